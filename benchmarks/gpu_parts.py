"""The parts of `gpu.py` that the host's clock times, and parity: each fills in values of bars, and figures.

Knows what is compared with what, and how it is judged fair; no bars and no files.
"""

from __future__ import annotations

import importlib
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from gpu_turns import (
    BEGIN,
    DEPTH,
    SAMPLING,
    WARM,
    Bench,
    Contender,
    Forwards,
    Found,
    Kept,
    NotMeasured,
    Ours,
    Round,
    Stock,
    prefilled,
    ratio,
    summary,
    with_random_weights,
)
from mlx.utils import tree_flatten

from selfdraft.engine import Engine, Request
from selfdraft.kernels.self_check import self_checks
from selfdraft.models.few_rows import use_few_row_kernels
from selfdraft.models.qwen3_5 import Qwen35, Qwen35Args
from selfdraft.params import SamplingParams
from selfdraft.state import RowState
from selfdraft.tuning.measure import Spread
from selfdraft.tuning.synthetic import BITS

NOMINAL = {"H100": 989e12, "H200": 989e12}  # FLOP/s, bf16 dense, by NVIDIA's data sheets


def device_name() -> str:
    """Of the GPU; "cpu" without one."""
    return "cpu" if mx.default_device() == mx.cpu else str(mx.device_info().get("device_name", "gpu"))


def cold(bench: Bench, found: Found) -> None:
    """Checks, model, and an engine's first token and cycles, with no kernel compiled before in this process."""
    figures: dict[str, Any] = {"imported_s": round(time.perf_counter() - BEGIN, 2), "checks": {}}
    for check in self_checks():
        begin = time.perf_counter()
        figures["checks"][check.name] = {
            "passed": check.passed,
            "seconds": round(time.perf_counter() - begin, 2),
            **({"reason": check.reason} if check.reason else {}),
        }
    begin = time.perf_counter()
    found.label = bench.built.label
    figures["model_s"] = round(time.perf_counter() - begin, 2)
    figures["model_bytes"] = bench.built.nbytes
    for name in ("cold", "warm"):
        begin = time.perf_counter()
        contender = Ours(bench, DEPTH, context=bench.extent.context)
        contender.restart()
        figures[name] = {
            "first_token_s": round(contender.rows[0].statistics.prompt_seconds, 3),
            f"engine_to_cycle_{WARM}_s": round(time.perf_counter() - begin, 3),
        }
    if folder := os.environ.get("MLX_PTX_CACHE_DIR"):
        started = time.time() - (time.perf_counter() - BEGIN)
        new = [path.stat().st_mtime >= started for path in Path(folder).glob("*.ptx")]
        figures["kernels_on_disk"] = {"from before": new.count(False), "compiled here": new.count(True)}
    found.figures["cold"] = figures


def stock(bench: Bench, found: Found) -> list[Contender]:
    """mlx-lm greedily and with our sampling, on a model of the same shape; none where it cannot be loaded."""
    extent = bench.extent
    try:
        theirs = importlib.import_module("mlx_lm.models.qwen3_5")
        make_cache = importlib.import_module("mlx_lm.models.cache").make_prompt_cache
        model = theirs.TextModel(theirs.TextModelArgs.from_dict(bench.sizes.config()))
        with_random_weights(model, bench.dtype)
        cache, text = make_cache(model), bench.text(extent.context)
        begin = time.perf_counter()
        model(mx.array([text[:-1]]), cache=cache)
        mx.eval([each.state for each in cache])
        found.figures["mlx_lm_first_prefill_s"] = round(time.perf_counter() - begin, 3)
        return [Stock(model, cache, text[-1], extent.cycles, settings) for settings in ({}, SAMPLING)]
    except (ImportError, ValueError, TypeError, AttributeError, RuntimeError) as error:  # its versions differ
        found.left_out("mlx-lm", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return []


def decoding(bench: Bench, found: Found) -> None:
    """One row behind 1k tokens: mlx-lm, plainly, at depth 3; what a rejection costs; how often the host waits."""
    context = bench.extent.context
    plain, greedy = Ours(bench, 0, context=context), Ours(bench, 0, context=context, greedy=True)
    deep, peers = Ours(bench, DEPTH, context=context), stock(bench, found)
    rounds = bench.in_turn([*peers, plain, greedy, deep], bench.extent.rounds, reserve=240)
    figures = found.figures["decoding"] = {name: summary(each) for name, each in rounds.items()}
    found.values["step"] = figures[plain.name]["cycle_ms"]["median"]
    found.values["step greedy"] = figures[greedy.name]["cycle_ms"]["median"]
    found.values["waits"] = figures[deep.name]["waits_per_cycle"]
    own = ratio(rounds[deep.name], rounds[plain.name])
    ratios = {"depth 3 over depth 0": own.rounded(3)}
    found.values["over own"] = own.median
    for peer in peers:
        ratios[f"depth 3 over {peer.name}"] = ratio(rounds[deep.name], rounds[peer.name]).rounded(3)
    if peers:  # over the faster of its two
        found.values["over mlx-lm"] = min(ratios[f"depth 3 over {peer.name}"]["median"] for peer in peers)
    found.figures["decoding_ratios"] = ratios
    emitted = Counter(count for one in rounds[deep.name] for count in one.emitted)
    found.figures["cycles_by_tokens_at_depth_3"] = dict(sorted(emitted.items()))
    commit(rounds[deep.name], found)


def commit(rounds: Sequence[Round], found: Found) -> None:
    """Cycles behind a rejection against those behind full acceptance: the next cycle's forward holds the rollback.

    Cycles differ by more than that; `gpu_profile` has the GPU's own time.
    """
    pairs = [(n, 1e3 * t) for one in rounds for n, t in zip(one.emitted, one.times[1:], strict=False)]
    kinds = [[t for n, t in pairs if n <= DEPTH], [t for n, t in pairs if n > DEPTH]]
    inside = Spread.of([1e3 * seconds for one in rounds for seconds in one.commits])
    whole = statistics.median(t for _, t in pairs)
    figures: dict[str, Any] = {"host_ms": inside.rounded(4), "cycle_ms": round(whole, 3)}
    found.figures["commit"] = figures
    if min(map(len, kinds)) < 2:
        found.left_out("commit after a rejection", f"too few cycles of a kind: {[len(kind) for kind in kinds]}")
        return
    rejected, full = (Spread.of(kind) for kind in kinds)
    figures["share"] = round((rejected.median - full.median) / whole, 5)
    # A median's standard error is 1.25 deviations over the root of the count; quartiles are 1.35 deviations apart.
    error = 1.25 / 1.35 * math.hypot(rejected.width / len(kinds[0]) ** 0.5, full.width / len(kinds[1]) ** 0.5)
    figures["behind_a_rejection_ms"] = {**rejected.rounded(3), "cycles": len(kinds[0])}
    figures["behind_full_acceptance_ms"] = {**full.rounded(3), "cycles": len(kinds[1])}
    figures["standard_error_of_share"] = round(error / whole, 5)


def verify(bench: Bench, found: Found) -> None:
    """Trunk forward and output projection, 4 tokens wide over one."""
    kinds = [(width, queued) for queued in (True, False) for width in (1, DEPTH + 1)]
    rounds = bench.in_turn([Forwards(bench, width, queued=queued) for width, queued in kinds], rounds=4)
    spreads = {name: Spread.of([1e3 * t for one in each for t in one.times]) for name, each in rounds.items()}
    one, wide = list(spreads.values())[:2]
    found.values["verify"] = wide.median / one.median
    found.figures["verify_ms"] = {name: spread.rounded(3) for name, spread in spreads.items()}


def more_rows(bench: Bench, found: Found) -> None:
    """Eight rows over one at depth 3."""
    context, rows = bench.extent.context, bench.extent.rows
    one, many = Ours(bench, DEPTH, context=context), Ours(bench, DEPTH, context=context, rows=rows)
    rounds = bench.in_turn([one, many], min(bench.extent.rounds, 5), reserve=200)
    found.values["rows"] = ratio(rounds[many.name], rounds[one.name]).median
    found.figures["rows"] = {name: summary(each) for name, each in rounds.items()}


def read_prompt(bench: Bench, tokens: int) -> float:
    """Seconds to the first token, the head's history included."""
    engine = Engine(bench.built.model)
    params = SamplingParams(depth=DEPTH, max_tokens=2, ignore_eos=True, **SAMPLING).resolved({})
    row = engine.add(Request(bench.text(tokens), params))
    for _ in engine.run(row):
        pass
    return row.statistics.prompt_seconds


def prefill(bench: Bench, found: Found) -> None:
    """8k tokens, against the bf16 peak; arithmetic of the quantised matrices alone, without attention."""
    tokens, side = bench.extent.prompt, bench.extent.square
    seconds = Spread.of([read_prompt(bench, tokens) for _ in range(4)][1:])
    model: Any = bench.built.model
    words: Any = tree_flatten(model.parameters())
    skipped = ("embed_tokens.weight", "lm_head.weight")
    used = sum(w.size * 32 // BITS for name, w in words if w.dtype == mx.uint32 and not name.endswith(skipped))
    speed = 2 * used * tokens / seconds.median
    a, b = (mx.random.normal((side, side)).astype(mx.bfloat16) for _ in range(2))
    mx.eval(a, b)
    peak = 2 * side**3 * 8 / statistics.median(waited_for(lambda: [a @ b for _ in range(8)]) for _ in range(8))
    found.values["prefill measured"] = speed / peak
    nominal = next((flops for name, flops in NOMINAL.items() if name in device_name()), None)
    if nominal is None:
        found.left_out("prefill of the nominal peak", f"no peak is known of {device_name()}")
    else:
        found.values["prefill"] = speed / nominal
    found.figures["prefill"] = {
        "tokens": tokens,
        "seconds": seconds.rounded(4),
        "tokens_per_second": round(tokens / seconds.median, 1),
        "weights_per_token": used,
        "tflops": round(speed / 1e12, 2),
        f"bf16_{side}_tflops": round(peak / 1e12, 2),
        "nominal_tflops": nominal and nominal / 1e12,
    }


def waited_for(call: Callable[[], list[mx.array]]) -> float:
    """Seconds of an evaluation."""
    begin = time.perf_counter()
    mx.eval(call())
    return time.perf_counter() - begin


def parity(bench: Bench, found: Found) -> None:
    """Verify rows against rows decoded alone, one token at a time; random weights in every layer."""
    config = {**bench.sizes.config(), "num_hidden_layers": bench.extent.layers}
    model = with_random_weights(Qwen35(Qwen35Args.from_config(config), False), bench.dtype)
    use_few_row_kernels(model)
    mx.eval(model.parameters())
    figures = {str(rows): compared(bench, model, rows) for rows in (1, bench.extent.rows)}
    one, many = figures.values()
    found.values["parity 1"], found.values["parity n"] = one["logits"], many["logits"]
    found.values["parity states"] = largest(each[what] for each in figures.values() for what in ("states", "behind"))
    found.figures["parity"] = {"layers": bench.extent.layers, "rows": figures}


def compared(bench: Bench, model: Any, rows: int) -> dict[str, Any]:
    """Largest differences: of the logits of a verify pass, of the states that it leaves, where rows keep 4, 3, 2, 1, 4
    and so on of its tokens, and of the logits of the token behind them."""
    width, size = DEPTH + 1, bench.sizes.vocabulary
    ids = [[(31 * row + 7 * place) % size for place in range(width + 1)] for row in range(rows)]
    begins = [prefilled(model, [(13 * i + row) % size for i in range(40 + 17 * row)]) for row in range(rows)]
    states, kept = [state.fork() for state in begins], [width - row % width for row in range(rows)]

    def forward(tokens: list[list[int]], held: list[RowState], counts: list[int]) -> mx.array:
        hidden, captured = model.forward(mx.array(tokens), held, keep_steps=True)
        logits: mx.array = model.logits(hidden)
        captured.commit(held, counts)
        mx.eval(logits, [state.arrays() for state in held])
        return logits

    wide = forward([row[:width] for row in ids], states, kept)
    narrow, left = [], []
    for row, (alone, count) in enumerate(zip(begins, kept, strict=True)):
        for place in range(width):
            narrow.append(forward([[ids[row][place]]], [alone], [1]))
            if place + 1 == count:
                left.append(alone.fork())
    worst = {"logits": difference(wide.reshape(rows * width, -1), mx.concatenate(narrow)[:, 0])}
    worst["states"] = largest(difference(a, b) for pair in zip(states, left, strict=True) for a, b in parts(*pair))
    behind = forward([[row[width]] for row in ids], states, [1] * rows)
    singles = [forward([[row[width]]], [alone], [1]) for row, alone in zip(ids, left, strict=True)]
    worst["behind"] = difference(behind, mx.concatenate(singles))
    spread: Any = mx.std(wide.astype(mx.float32)).item()
    return {**worst, "standard_deviation_of_logits": round(spread, 4)}


def parts(one: RowState, other: RowState) -> Iterator[tuple[mx.array, mx.array]]:
    """What two states of the same length hold, side by side."""
    assert one.length == other.length, (one.length, other.length)
    for a, b in zip(one.recurrent, other.recurrent, strict=True):
        yield from ((a.memory, b.memory), (a.window, b.window))
    for c, d in zip(one.attention, other.attention, strict=True):
        for e, f in ((c.keys, d.keys), (c.values, d.values)):
            assert e is not None
            assert f is not None
            yield e[:, :, : one.length], f[:, :, : one.length]


def largest(values: Iterable[float]) -> float:
    """NaN if any is: `max` loses it."""
    every = list(values)
    return math.nan if any(map(math.isnan, every)) else max(every)


def difference(one: mx.array, other: mx.array) -> float:
    """Largest, NaN if anything is."""
    assert one.shape == other.shape, (one.shape, other.shape)
    worst: Any = mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max().item()
    return float(worst)


def long_context(bench: Bench, found: Found) -> None:
    """Behind 64k tokens over behind 1k, at depth 0 and 3; the long prompt is forwarded once."""
    extent = bench.extent
    before = found.figures.get("prefill", {}).get("tokens_per_second")
    if before and (expected := 1.5 * extent.long / before) > min(90, bench.left - 75):
        raise NotMeasured(f"by the speed of {extent.prompt:,} tokens the long prompt may take {expected:.0f} s")
    short = [Ours(bench, depth, context=extent.context) for depth in (0, DEPTH)]
    long = [Ours(bench, depth, context=extent.long) for depth in (0, DEPTH)]
    session = Kept(extent.long)
    for contender in long:
        contender.session = session
    long[1].restart()  # the one that drafts leaves the head's history, too
    prompt_seconds = long[1].rows[0].statistics.prompt_seconds
    rounds = bench.in_turn([*short, *long], min(extent.rounds, 5), reserve=120)
    for key, near, far in zip(("long plain", "long"), short, long, strict=True):
        found.values[key] = ratio(rounds[far.name], rounds[near.name]).median
    found.figures["long"] = {
        "prompt_s": round(prompt_seconds, 2),
        **{name: summary(each) for name, each in rounds.items()},
    }
