"""The parts of `gpu.py` that the GPU's own clock times, by way of torch's profiler (CUPTI): kernels, gaps between them.

Knows products, cycles, forwards and events of the device; no bars and no files. They come last: a profiler that has run
once may slow the host down from then on.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from gpu_parts import read_prompt, waited_for
from gpu_turns import DEPTH, Bench, Forwards, Found, NotMeasured, Ours

from selfdraft.kernels.verify_qmv import verify_qmv
from selfdraft.tuning.kernel_bench import available
from selfdraft.tuning.measure import Spread
from selfdraft.tuning.synthetic import GROUP

INPUTS, OUTPUTS, COUNT = 5120, 17408, 24  # of a matrix; so many in one evaluation go past the L2
COPIED = 1 << 28  # bf16 numbers of a copy: 512 MB
GAP = 5_000  # nanoseconds from which on a gap counts as idle; kernels of one graph follow each other in 500
LISTED = 25

Event = tuple[int, int, str]  # begin and duration in nanoseconds, name


@dataclass(frozen=True)
class Profile:
    """What a device did: kernels and copies in order; and what the host called, name by name."""

    events: list[Event]
    calls: dict[str, int]

    @property
    def busy(self) -> int:
        """Nanoseconds in which anything ran."""
        total, end = 0, 0
        for begin, duration, _ in self.events:
            total += max(0, begin + duration - max(begin, end))
            end = max(end, begin + duration)
        return total

    @property
    def span(self) -> int:
        """Nanoseconds from the first to the end of the last."""
        return max(begin + duration for begin, duration, _ in self.events) - self.events[0][0]

    @property
    def gaps(self) -> list[tuple[int, str]]:
        """Nanoseconds in which nothing ran, with what came then."""
        found, end = [], self.events[0][0]
        for begin, duration, name in self.events:
            if begin > end:
                found.append((begin - end, name))
            end = max(end, begin + duration)
        return found

    def by_name(self) -> dict[str, list[float]]:
        """Microseconds of each run of a kernel; those with most in all first."""
        found: dict[str, list[float]] = defaultdict(list)
        for _, duration, name in self.events:
            found[name].append(duration / 1e3)
        return dict(sorted(found.items(), key=lambda pair: -sum(pair[1])))

    def kernels(self, count: int) -> list[dict[str, Any]]:
        """What took most, per one of `count` cycles."""
        return [
            {
                "name": name[:90],
                "runs": round(len(times) / count, 2),
                "us": round(sum(times) / count, 2),
                "us_a_run": round(statistics.median(times), 2),
            }
            for name, times in list(self.by_name().items())[:LISTED]
        ]


def profiler() -> Callable[[Callable[[], object]], Profile]:
    """What profiles a call, and waits for the device at its end.

    Raises:
        NotMeasured: there is no NVIDIA GPU, or no torch that has one.
    """
    if not available() or mx.metal.is_available():
        raise NotMeasured("no GPU" if not available() else "no profiler of a Metal GPU is known")
    if importlib.util.find_spec("torch") is None:
        raise NotMeasured("torch, whose profiler reads the GPU's clock, is not installed")
    torch, profiling = importlib.import_module("torch"), importlib.import_module("torch.profiler")
    if not torch.cuda.is_available():
        raise NotMeasured("the torch that is installed has no GPU")
    torch.zeros(1, device="cuda")

    def profiled(call: Callable[[], object]) -> Profile:
        mx.synchronize()
        with profiling.profile(activities=[profiling.ProfilerActivity.CUDA]) as profile:
            call()
            mx.synchronize()
        events: list[Event] = []
        calls: dict[str, int] = defaultdict(int)
        for event in profile.profiler.kineto_results.events():
            if "CUDA" in str(event.device_type()):
                events.append((event.start_ns(), event.duration_ns(), event.name()))
            else:
                calls[event.name()] += 1
        if not events:
            raise NotMeasured("the profiler saw nothing of the GPU")
        return Profile(sorted(events), dict(calls))

    profiled(lambda: mx.eval(mx.ones((1024,)) + 1))  # the first one takes longer
    return profiled


def kernels(bench: Bench, found: Found) -> None:
    """Products of one row and four against a copy of 512 MB, in turn: by the host's clock, then by the GPU's."""
    if not available():
        raise NotMeasured("no GPU")
    kinds, nbytes = _jobs()
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(13):
        for name, job in kinds.items():
            seconds = waited_for(job)
            if number > 2:
                times[name].append(1e6 * seconds / COUNT)
    figures = found.figures["kernels"] = {"bytes": nbytes, "wall_us": _spreads(times)}
    found.values["qmv share wall"], found.values["qmv rows wall"] = _judged(times, nbytes)
    profiled = profiler()
    runs: dict[str, list[float]] = {name: [] for name in kinds}
    names: dict[str, str] = {}
    for _ in range(3):
        for name, job in kinds.items():
            seen = profiled(partial(waited_for, job))
            # Products that need nothing of each other overlap: what counts is the time that all of them take.
            names[name], runs[name] = next(iter(seen.by_name())), [*runs[name], seen.busy / COUNT / 1e3]
    figures["gpu_us"], figures["gpu_kernels"] = _spreads(runs), {name: each[:90] for name, each in names.items()}
    found.values["qmv share"], found.values["qmv rows"] = _judged(runs, nbytes)


def _jobs() -> tuple[dict[str, Callable[[], list[mx.array]]], dict[str, int]]:
    """What is timed, `COUNT` of each in one evaluation, and the bytes that one of them must move."""
    matrix = (mx.random.normal((OUTPUTS, INPUTS)) * 0.02).astype(mx.bfloat16)
    first = mx.quantize(matrix, group_size=GROUP, bits=4)
    matrices: Any = [tuple(array + 0 for array in first) for _ in range(COUNT)]
    whole = mx.random.normal((COPIED,)).astype(mx.bfloat16)
    rows = {count: mx.random.normal((1, count, INPUTS)).astype(mx.bfloat16) for count in (1, DEPTH + 1)}
    mx.eval(matrices, whole, rows)

    def products(x: mx.array) -> list[mx.array]:
        return [verify_qmv(x, *each, group_size=GROUP, bits=4) for each in matrices]

    weights = sum(array.nbytes for array in matrices[0])
    kinds: dict[str, Callable[[], list[mx.array]]] = {"copy": lambda: [whole + 0 for _ in range(COUNT)]}
    kinds |= {f"{count} rows": partial(products, x) for count, x in rows.items()}
    moved = {f"{count} rows": weights + x.nbytes * (INPUTS + OUTPUTS) // INPUTS for count, x in rows.items()}
    return kinds, {"copy": 2 * whole.nbytes, **moved}


def _judged(times: dict[str, list[float]], nbytes: dict[str, int]) -> tuple[float, float]:
    """Share of the copy's bandwidth at one row; time at four rows over one."""
    copied, one, four = (statistics.median(each) for each in times.values())
    return (nbytes["1 rows"] / one) / (nbytes["copy"] / copied), four / one


def _spreads(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {name: Spread.of(each).rounded() for name, each in times.items()}


def profile(bench: Bench, found: Found) -> None:
    """How much of a cycle the device idles, and what it does in it; the same of forwards and of a prompt."""
    profiled, count = profiler(), bench.extent.profiled
    cycles = found.figures["profiled_cycles"] = {}
    for key, depth in (("idle plain", 0), ("idle", DEPTH)):
        contender = Ours(bench, depth, context=bench.extent.context)
        contender.restart()
        alone = 1e3 * statistics.median(contender.advance(count).times)
        seen = profiled(partial(contender.advance, count))
        if cycle := found.figures.get("decoding", {}).get(contender.name):  # which no profiler slowed down
            found.values[key] = 1 - seen.busy / count / 1e6 / cycle["cycle_ms_mean"]
        cycles[contender.name] = {
            **_described(seen, count),
            "ms_not_profiled": round(alone, 3),
            "idle_share_not_profiled": round(1 - seen.busy / count / 1e6 / alone, 4),  # of kernels as profiled
        }
    forwards = found.figures["profiled_forwards"] = {}
    busy = []
    for width in (1, DEPTH + 1):
        forward = Forwards(bench, width, queued=True)
        forward.round()
        runs = bench.extent.forwards + 2  # as `round` launches
        seen = profiled(forward.round)
        busy.append(seen.busy / runs)
        forwards[forward.name] = _described(seen, runs)
    found.values["verify GPU"] = busy[1] / busy[0]
    commit(bench, found, profiled)
    found.figures["profiled_prompt"] = _described(profiled(lambda: read_prompt(bench, bench.extent.prompt)), 1)


def commit(bench: Bench, found: Found, profiled: Callable[[Callable[[], object]], Profile]) -> None:
    """Verify forwards behind one of which all tokens were kept, or one, or two: the GPU's time, in turn."""
    width, runs = DEPTH + 1, bench.extent.forwards + 2
    forwards = [Forwards(bench, width, queued=True, kept=kept) for kept in (width, 1, 2)]
    times: dict[str, list[float]] = {forward.name: [] for forward in forwards}
    for number in range(6):
        for forward in forwards:
            seen = profiled(forward.round)
            if number:
                times[forward.name].append(seen.busy / runs / 1e6)
    found.figures["forward_by_kept_ms"] = {name: Spread.of(each).rounded(4) for name, each in times.items()}
    full, *rejected = (statistics.median(each) for each in times.values())
    if cycle := found.figures.get("commit", {}).get("cycle_ms"):
        found.values["commit"] = (max(rejected) - full) / cycle


def _described(seen: Profile, count: int) -> dict[str, Any]:
    """Per one of `count`."""
    gaps = [(ns, name) for ns, name in seen.gaps if ns > GAP]
    waits = {name: number for name, number in seen.calls.items() if "Synchronize" in name or "Memcpy" in name}
    return {
        "busy_ms": round(seen.busy / count / 1e6, 3),
        "span_ms": round(seen.span / count / 1e6, 3),
        "idle_share": round(1 - seen.busy / seen.span, 4),
        "kernels": round(len(seen.events) / count, 1),
        "gaps_over_5_us": {
            "count": round(len(gaps) / count, 2),
            "ms": round(sum(ns for ns, _ in gaps) / count / 1e6, 3),
            "longest": _longest(gaps),
        },
        "calls_that_may_wait": {name: round(number / count, 2) for name, number in waits.items()},
        "top": seen.kernels(count),
    }


def _longest(gaps: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{"us": round(ns / 1e3, 1), "before": name[:90]} for ns, name in sorted(gaps, reverse=True)[:10]]
