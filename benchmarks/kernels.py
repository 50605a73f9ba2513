"""Our kernels against what MLX has, on the GPU of this machine: products of few rows, attention of few queries, the
gated delta rule of a verify pass. Needs a GPU.

Several operations are queued in one evaluation, so each figure holds its part of the host's time. Weights are rotated
past the cache. A copy (x + 0 over 512 MB of bf16, read plus written) is timed in the same run.

    usage: kernels.py [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from selfdraft.kernels import few_query_attention, gated_delta_tape, verify_qmv
from selfdraft.kernels.gated_delta import gated_delta_steps
from selfdraft.kernels.portable import backend

MATRICES = ((5120, 17408, 4), (17408, 5120, 4), (5120, 1024, 4), (5120, 17408, 8))  # inputs, outputs, bits
ROWS = (1, 4, 8, 16, 32)
LENGTHS = (1024, 8192, 65536)
GROUP = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", help="write the figures as JSON to this file")
    options = parser.parse_args()
    if backend() is None:
        print("kernels.py: there is no GPU here, and these kernels run on one only", file=sys.stderr)
        return 2
    checks = {
        check.name: check.passed for check in (verify_qmv.CHECK, few_query_attention.CHECK, gated_delta_tape.CHECK)
    }
    print(f"{mx.device_info().get('device_name', backend())}, mlx {mx.__version__}; checks {checks}", flush=True)
    x = mx.random.normal((1 << 28,)).astype(mx.bfloat16)
    mx.eval(x)
    copied = 2 * x.nbytes / _seconds(lambda: [x + 0])
    print(f"copy {copied / 1e9:.0f} GB/s\n\n{'what':<34}{'ours us':>9}{'MLX us':>9}", flush=True)
    rows = [*_products(), *_attention(), *_delta_rule()]
    if options.output:
        report = {"device": mx.device_info(), "mlx": mx.__version__, "copy_bytes_per_second": copied, "rows": rows}
        Path(options.output).write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


def _products() -> list[dict[str, Any]]:
    found = []
    for inputs, outputs, bits in MATRICES:
        count = max(2, int(1.3e9 / (inputs * outputs * bits / 8)))
        matrices = [_quantised(outputs, inputs, bits) for _ in range(min(count, 24))]
        for rows in ROWS:
            x = mx.random.normal((1, rows, inputs)).astype(mx.bfloat16)
            mx.eval(x, matrices)
            how = {"group_size": GROUP, "bits": bits}

            def ours(x: mx.array = x, how: Any = how, matrices: Any = matrices) -> list[mx.array]:
                return [verify_qmv.verify_qmv(x, *each, **how) for each in matrices]

            def stock(x: mx.array = x, how: Any = how, matrices: Any = matrices) -> list[mx.array]:
                return [mx.quantized_matmul(x, *each, transpose=True, **how) for each in matrices]

            found.append(_row(f"{inputs} x {outputs}, {bits} bits, {rows} rows", ours, stock, len(matrices)))
    return found


def _attention() -> list[dict[str, Any]]:
    found = []
    for length in LENGTHS:
        kv = [mx.random.normal((1, 4, length, 256)).astype(mx.bfloat16) for _ in range(16)]
        end = mx.array([length], dtype=mx.int32)
        for tokens in (1, 4):
            q = mx.random.normal((1, 24, tokens, 256)).astype(mx.bfloat16)
            mx.eval(q, kv, end)
            mask = "causal" if tokens > 1 else None
            pairs = list(zip(kv[::2], kv[1::2], strict=True))

            def ours(q: mx.array = q, pairs: Any = pairs, end: mx.array = end) -> list[mx.array]:
                return [few_query_attention.few_query_attention(q, *each, end, scale=1 / 16) for each in pairs]

            def stock(q: mx.array = q, pairs: Any = pairs, mask: Any = mask) -> list[mx.array]:
                return [mx.fast.scaled_dot_product_attention(q, *each, scale=1 / 16, mask=mask) for each in pairs]

            found.append(_row(f"attention, {tokens} of {length:,} tokens", ours, stock, len(pairs)))
    return found


def _delta_rule() -> list[dict[str, Any]]:
    found = []
    for tokens in (1, 4):
        q, k = (mx.random.normal((1, tokens, 16, 128)).astype(mx.bfloat16) / 11 for _ in range(2))
        v = mx.random.normal((1, tokens, 48, 128)).astype(mx.bfloat16)
        g, beta = (mx.random.uniform(0.5, 1, (1, tokens, 48)) for _ in range(2))
        states = [mx.random.normal((1, 48, 128, 128)) for _ in range(12)]
        accepted = mx.array([tokens], dtype=mx.int32)
        _, _, tape = gated_delta_tape.gated_delta_verify(q, k, v, g, beta, states[0], None, accepted)
        mx.eval(q, k, v, g, beta, states, tape.deltas)
        given = (q, k, v, g, beta)

        def ours(
            given: Any = given, states: Any = states, tape: Any = tape, accepted: Any = accepted
        ) -> list[mx.array]:
            verify = gated_delta_tape.gated_delta_verify
            return [x for state in states for x in verify(*given, state, tape, accepted)[:2]]

        def stock(given: Any = given, states: Any = states) -> list[mx.array]:
            return [gated_delta_steps(*given, state)[0] for state in states]

        found.append(_row(f"gated delta rule, {tokens} tokens", ours, stock, len(states)))
    return found


def _quantised(outputs: int, inputs: int, bits: int) -> tuple[mx.array, ...]:
    matrix = (mx.random.normal((outputs, inputs)) * 0.02).astype(mx.bfloat16)
    return tuple(mx.quantize(matrix, group_size=GROUP, bits=bits))


def _row(
    what: str, ours: Callable[[], list[mx.array]], stock: Callable[[], list[mx.array]], count: int
) -> dict[str, Any]:
    figures = [_seconds(call) / count * 1e6 for call in (ours, stock)]
    print(f"{what:<34}{figures[0]:>9.1f}{figures[1]:>9.1f}", flush=True)
    return {"what": what, "ours_us": round(figures[0], 1), "mlx_us": round(figures[1], 1)}


def _seconds(call: Callable[[], list[mx.array]], rounds: int = 10) -> float:
    """Median of some rounds after three that do not count."""
    times = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


if __name__ == "__main__":
    sys.exit(main())
