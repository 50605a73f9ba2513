"""Our kernels against what MLX has, on the GPU of this machine: products of few rows, attention of few queries, the
gated delta rule of a verify pass. Knows kernels and times them; prints nothing.

Several operations are queued in one evaluation, so each figure holds its part of the host's time. Weights are rotated
past the cache. A copy (x + 0 over 512 MB of bf16, read plus written) is timed in the same run: bytes that an operation
must move, over its time, are given as a share of that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from ..kernels import few_query_attention, gated_delta_tape, verify_qmv
from ..kernels.gated_delta import gated_delta_steps
from ..kernels.portable import backend
from ..kernels.self_check import self_checks

__all__ = ["Row", "available", "checks", "copy_speed", "kernel_rows"]

MATRICES = ((5120, 17408, 4), (17408, 5120, 4), (5120, 1024, 4), (5120, 17408, 8))  # inputs, outputs, bits
ROWS = (1, 4, 8, 16, 32)
LENGTHS = (1024, 8192, 65536)
GROUP = 64

Row = dict[str, Any]


def available() -> bool:
    """Whether there is a GPU that these kernels run on."""
    return backend() is not None


def checks() -> dict[str, bool]:
    """Whether each kernel agrees with its reference here."""
    return {check.name: check.passed for check in self_checks()}


def copy_speed() -> float:
    """Bytes a second of a copy, read plus written."""
    x = mx.random.normal((1 << 28,)).astype(mx.bfloat16)
    mx.eval(x)
    return 2 * x.nbytes / _seconds(lambda: [x + 0])


def kernel_rows(copied: float) -> Iterator[Row]:
    """Each operation, as soon as it is measured: microseconds of ours and of MLX's, bytes it must move (weights and
    activations, once), and what share of a copy's speed moving them in our time is.

    Args:
        copied: see `copy_speed`.
    """
    for rows in (_products(), _attention(), _delta_rule()):
        for row in rows:
            yield {**row, "share_of_copy": round(row["bytes"] / (row["ours_us"] * 1e-6) / copied, 3)}


def _products() -> Iterator[Row]:
    for inputs, outputs, bits in MATRICES:
        count = max(2, int(1.3e9 / (inputs * outputs * bits / 8)))
        matrices: Any = [_quantised(outputs, inputs, bits) for _ in range(min(count, 24))]
        for rows in ROWS:
            x = mx.random.normal((1, rows, inputs)).astype(mx.bfloat16)
            mx.eval(x, matrices)
            how: dict[str, Any] = {"group_size": GROUP, "bits": bits}

            def ours(x: mx.array = x, how: Any = how, matrices: Any = matrices) -> list[mx.array]:
                return [verify_qmv.verify_qmv(x, w, s, b, **how) for w, s, b in matrices]

            def stock(x: mx.array = x, how: Any = how, matrices: Any = matrices) -> list[mx.array]:
                return [mx.quantized_matmul(x, w, s, b, transpose=True, **how) for w, s, b in matrices]

            moved = sum(array.nbytes for array in matrices[0]) + x.nbytes * (inputs + outputs) // inputs
            yield _row(f"{inputs} x {outputs}, {bits} bits, {rows} rows", ours, stock, len(matrices), moved)


def _attention() -> Iterator[Row]:
    for length in LENGTHS:
        kv = [mx.random.normal((1, 4, length, 256)).astype(mx.bfloat16) for _ in range(16)]
        end = mx.array([length], dtype=mx.int32)
        for tokens in (1, 4):
            q = mx.random.normal((1, 24, tokens, 256)).astype(mx.bfloat16)
            mx.eval(q, kv, end)
            mask = "causal" if tokens > 1 else None
            pairs: Any = list(zip(kv[::2], kv[1::2], strict=True))

            def ours(q: mx.array = q, pairs: Any = pairs, end: mx.array = end) -> list[mx.array]:
                return [few_query_attention.few_query_attention(q, [k], [v], end, scale=1 / 16) for k, v in pairs]

            def stock(q: mx.array = q, pairs: Any = pairs, mask: Any = mask) -> list[mx.array]:
                return [mx.fast.scaled_dot_product_attention(q, k, v, scale=1 / 16, mask=mask) for k, v in pairs]

            moved = 2 * kv[0].nbytes + 2 * q.nbytes
            yield _row(f"attention, {tokens} of {length:,} tokens", ours, stock, len(pairs), moved)


def _delta_rule() -> Iterator[Row]:
    for tokens in (1, 4):
        q, k = (mx.random.normal((1, tokens, 16, 128)).astype(mx.bfloat16) / 11 for _ in range(2))
        v = mx.random.normal((1, tokens, 48, 128)).astype(mx.bfloat16)
        g, beta = (mx.random.uniform(0.5, 1, (1, tokens, 48)) for _ in range(2))
        states = [mx.random.normal((1, 48, 128, 128)) for _ in range(12)]
        accepted = mx.array([tokens], dtype=mx.int32)
        _, _, tape = gated_delta_tape.gated_delta_verify(q, k, v, g, beta, states[0], None, accepted)
        mx.eval(q, k, v, g, beta, states, tape.deltas)
        given: Any = (q, k, v, g, beta)

        def ours(
            given: Any = given, states: Any = states, tape: Any = tape, accepted: Any = accepted
        ) -> list[mx.array]:
            verify: Any = gated_delta_tape.gated_delta_verify
            return [x for state in states for x in verify(*given, state, tape, accepted)[:2]]

        def stock(given: Any = given, states: Any = states) -> list[mx.array]:
            steps: Any = gated_delta_steps
            return [steps(*given, state)[0] for state in states]

        moved = 2 * states[0].nbytes + q.nbytes + k.nbytes + 2 * v.nbytes  # the state is read and written
        yield _row(f"gated delta rule, {tokens} tokens", ours, stock, len(states), moved)


def _quantised(outputs: int, inputs: int, bits: int) -> Any:
    matrix = (mx.random.normal((outputs, inputs)) * 0.02).astype(mx.bfloat16)
    return tuple(mx.quantize(matrix, group_size=GROUP, bits=bits))


def _row(
    what: str, ours: Callable[[], list[mx.array]], stock: Callable[[], list[mx.array]], count: int, nbytes: int
) -> Row:
    figures = [_seconds(call) / count * 1e6 for call in (ours, stock)]
    return {"what": what, "ours_us": round(figures[0], 1), "mlx_us": round(figures[1], 1), "bytes": nbytes}


def _seconds(call: Callable[[], list[mx.array]], rounds: int = 10) -> float:
    """Median of some rounds after three that do not count."""
    times = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        mx.eval(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])
