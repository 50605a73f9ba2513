"""Who takes turns in `gpu.py`, and what a turn is: rows of the engine, stock mlx-lm, forwards of a synthetic model.

Knows the engine and how to drive mlx-lm; no bars, no files, and not what is compared with what.
"""

from __future__ import annotations

import copy
import importlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from selfdraft.device import choose_dtype
from selfdraft.engine import Boundary, Engine, Request, Row
from selfdraft.engine.accept import BLOCK
from selfdraft.engine.cycle import Cycle, Flight, Outcome
from selfdraft.params import SamplingParams
from selfdraft.state import RowState
from selfdraft.tuning.measure import Spread
from selfdraft.tuning.synthetic import BITS, GROUP, SHAPES, Shape, SyntheticModel, synthetic

BEGIN = time.perf_counter()
ACCEPTANCE = (0.976, 0.952, 0.881)
SAMPLING: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
DEPTH = 3
WARM = 4  # cycles of a row, or steps of mlx-lm, that do not count


class NotMeasured(Exception):
    """A part cannot be measured here; says why."""


@dataclass(frozen=True)
class Extent:
    """How much is measured: lengths in tokens, rounds that count, cycles or forwards of a round, and so on."""

    context: int = 1024
    long: int = 65_536
    prompt: int = 8192
    rounds: int = 7
    cycles: int = 40
    forwards: int = 10
    rows: int = 8
    layers: int = 16  # of the random model
    profiled: int = 20  # cycles
    square: int = 8192  # side of the dense product


QUICK = Extent(
    context=32, long=320, prompt=128, rounds=1, cycles=8, forwards=3, rows=3, layers=4, profiled=4, square=256
)


@dataclass
class Found:
    """What parts found: the model's label, values by the bar that they are for, figures, what was left out and why."""

    label: str = ""
    values: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    not_measured: list[str] = field(default_factory=list)

    def left_out(self, what: str, why: str) -> None:
        self.not_measured.append(f"{what}: not measured: {why}")
        print(self.not_measured[-1], flush=True)


@dataclass
class Round:
    """Of one contender: seconds and tokens of each cycle; host seconds inside commit, and inside read, where it waits
    for the device; how often it did."""

    times: list[float]
    emitted: list[int]
    commits: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    waits: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.emitted) / sum(self.times)


class Contender(Protocol):
    """What takes turns."""

    name: str

    def round(self) -> Round: ...


class TimedCycle(Cycle):
    """A cycle that says how long the host was inside `commit`, and inside `read`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, BLOCK)
        self.commits: list[float] = []
        self.reads: list[float] = []

    def read(self, flight: Flight) -> Outcome:
        begin = time.perf_counter()
        outcome = super().read(flight)
        self.reads.append(time.perf_counter() - begin)
        return outcome

    def commit(self, flight: Flight, outcome: Outcome) -> None:
        begin = time.perf_counter()
        super().commit(flight, outcome)
        self.commits.append(time.perf_counter() - begin)


class Kept:
    """A session that keeps what stands before the last token of a prompt: a long one is forwarded once."""

    def __init__(self, tokens: int) -> None:
        self.stops = (tokens - 1,)
        self._boundary: Boundary | None = None

    def resume(self, length: int, *, drafts: bool) -> Boundary | None:
        known = self._boundary
        if known is None or length >= known.state.length:
            return None
        return Boundary(known.state.fork(), known.hidden, known.cuts)

    def keep(self, tokens: Sequence[int], boundary: Boundary) -> None:
        self._boundary = boundary

    def release(self) -> None:
        pass


class Ours:
    """Rows of our engine behind a context, new ones every round."""

    def __init__(self, bench: Bench, depth: int, *, context: int, rows: int = 1, greedy: bool = False) -> None:
        self.name = f"depth {depth}{' greedy' if greedy else ''}, {rows} row{'s' * (rows > 1)}, {context:,} tokens"
        model = bench.built.model
        self._cycle = TimedCycle(model)
        self.engine = Engine(model, cycle=self._cycle)
        settings: dict[str, Any] = {"temperature": 0.0} if greedy else SAMPLING
        # More than any row comes to, and few enough for buffers that are made for them.
        self._params = SamplingParams(depth=depth, max_tokens=1024, ignore_eos=True, **settings).resolved({})
        self._prompts = [bench.text(context, row) for row in range(rows)]
        self._cycles = bench.extent.cycles
        self.session: Kept | None = None
        self.rows: list[Row] = []

    def restart(self) -> None:
        """New rows, through their prompts and the first cycles."""
        for row in self.rows:
            self.engine.cancel(row)
        requests = [Request(prompt, self._params, session=self.session) for prompt in self._prompts]
        self.rows = [self.engine.add(request) for request in requests]
        while not all(row.emitted for row in self.rows):
            self.engine.step()
        self.advance(WARM)

    def advance(self, cycles: int) -> Round:
        """So many cycles of all rows."""
        times, emitted = [], []
        self._cycle.commits, self._cycle.reads, waits = [], [], self._cycle.synchronisations
        for _ in range(cycles):
            before, begin = sum(len(row.emitted) for row in self.rows), time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - begin)
            emitted.append(sum(len(row.emitted) for row in self.rows) - before)
        if broken := next((row.error for row in self.rows if row.error), None):
            raise broken
        return Round(times, emitted, self._cycle.commits, self._cycle.reads, self._cycle.synchronisations - waits)

    def round(self) -> Round:
        self.restart()
        return self.advance(self._cycles)


class Stock:
    """Stock mlx-lm going on behind a prompt: its own model, loop and sampler. `cache` holds all but the last token."""

    def __init__(self, model: Any, cache: Any, last: int, cycles: int, settings: dict[str, Any]) -> None:
        generate = importlib.import_module("mlx_lm.generate")
        sampler = importlib.import_module("mlx_lm.sample_utils").make_sampler(
            temp=settings.get("temperature", 0.0), top_p=settings.get("top_p", 0.0), top_k=settings.get("top_k", 0)
        )
        self.name = f"mlx-lm{'' if settings else ' greedy'}"
        self._cycles = cycles
        # On the stream of everybody: what it has queued is then done before another's turn begins.
        self._steps: Iterator[Any] = generate.generate_step(
            mx.array([last]),
            model,
            mx.default_stream(mx.default_device()),
            max_tokens=10**6,
            sampler=sampler,
            prompt_cache=copy.deepcopy(cache),
        )

    def round(self) -> Round:
        for _ in range(WARM):
            next(self._steps)
        times = []
        for _ in range(self._cycles):
            begin = time.perf_counter()
            next(self._steps)
            times.append(time.perf_counter() - begin)
        return Round(times, [1] * self._cycles)


class Forwards:
    """Trunk forwards of a width, each committed before the next.

    Args:
        queued: whether the next is queued before one is waited for, as in the engine.
        kept: how many of its tokens are committed; all by default.
    """

    def __init__(self, bench: Bench, width: int, *, queued: bool, kept: int | None = None) -> None:
        self.name = f"{'queued' if queued else 'waited for'}, {width} wide" + (f", {kept} kept" if kept else "")
        self._width, self._queued, self._count = width, queued, bench.extent.forwards
        self._kept = kept or width
        self._model, self._state = bench.built.model, prefilled(bench.built.model, bench.text(bench.extent.context))
        self._tokens = mx.array([bench.text(width, 1)])

    def launch(self) -> list[mx.array]:
        """Queue one."""
        hidden, captured = self._model.forward(self._tokens, [self._state], keep_steps=True)
        logits = self._model.logits(hidden)
        captured.commit([self._state], [self._kept])
        out = [logits, *self._state.arrays()]
        mx.async_eval(out)
        return out

    def round(self) -> Round:
        marks, ahead = [], self.launch()
        for _ in range(self._count + 1):
            if self._queued:
                out, ahead = ahead, self.launch()
                mx.eval(out[0])
            else:
                mx.eval(self.launch())
            marks.append(time.perf_counter())
        mx.eval(ahead)
        return Round([b - a for a, b in pairwise(marks)], [self._width] * self._count)


class Bench:
    """What parts share: the synthetic model, texts of its process, and the time that is left."""

    def __init__(self, shape: str, extent: Extent, budget: float) -> None:
        self.shape, self.extent, self._budget = shape, extent, budget
        self.dtype = choose_dtype("auto", quantised=True) or mx.bfloat16

    @cached_property
    def built(self) -> SyntheticModel:
        return synthetic(self.shape, ACCEPTANCE, dtype=self.dtype)

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self._budget - (time.perf_counter() - BEGIN)

    def text(self, tokens: int, row: int = 0) -> list[int]:
        """A walk of the process, another one for each row."""
        planted = self.built.planted
        return planted.greedy(997 * row % planted.tokens, tokens)

    def in_turn(self, contenders: Sequence[Contender], rounds: int, reserve: float = 0) -> dict[str, list[Round]]:
        """Rounds of each, every second one backwards, behind one that does not count; fewer, but three, if less than
        `reserve` seconds are left."""
        found: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
        for number in range(rounds + 1):
            for contender in contenders if number % 2 else contenders[::-1]:
                one = contender.round()
                mx.synchronize()
                if number:
                    found[contender.name].append(one)
            if number >= 3 and self.left < reserve:
                break
        return found


def prefilled(model: Any, ids: Sequence[int]) -> RowState:
    """A state behind some tokens."""
    state: RowState = model.new_state()
    _, captured = model.forward(mx.array([list(ids)]), [state], keep_steps=False)
    captured.commit([state], [len(ids)])
    mx.eval(state.arrays())
    return state


def with_random_weights(module: Any, dtype: mx.Dtype) -> Any:
    """A model quantised to random words in every layer, each output of order 1; never held unquantised."""
    nn.quantize(module, group_size=GROUP, bits=BITS)  # lazy: what is not evaluated before it is replaced costs nothing
    weights = dict(tree_flatten(module.parameters()))
    mx.random.seed(0)
    for name, tensor in weights.items():
        step = 1 / math.sqrt(21.25 * tensor.shape[-1] * GROUP)  # 21.25: the variance of 0..15
        if tensor.dtype == mx.uint32:
            halves = (*tensor.shape[:-1], 2 * tensor.shape[-1])
            weights[name] = mx.random.randint(0, 1 << 16, halves, dtype=mx.uint16).view(mx.uint32)
        elif name.endswith((".scales", ".biases")):
            weights[name] = mx.full(tensor.shape, step if name.endswith(".scales") else -7.5 * step, dtype)
        elif name.endswith("A_log"):
            weights[name] = mx.log(mx.random.uniform(0.05, 2.0, tensor.shape))
        elif "conv1d" in name:
            weights[name] = mx.random.uniform(-0.5, 0.5, tensor.shape).astype(dtype)
        else:  # norms and dt_bias
            weights[name] = mx.ones(tensor.shape, dtype)
        mx.eval(weights[name])
    module.load_weights(list(weights.items()), strict=True)
    module.eval()
    return module


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians with quartiles: tokens a second over rounds, milliseconds over cycles."""
    times, emitted = [t for one in rounds for t in one.times], [n for one in rounds for n in one.emitted]
    return {
        "tokens_per_second": Spread.of([one.rate for one in rounds]).rounded(),
        "cycle_ms": Spread.of([1e3 * seconds for seconds in times]).rounded(3),
        "tokens_per_cycle": round(statistics.fmean(emitted), 3),
        "cycle_ms_mean": round(1e3 * statistics.fmean(times), 3),
        # What the host does in a cycle; where it is well ahead MLX holds it up in there, too, so it is at most this.
        "host_ms_mean": round(1e3 * (sum(times) - sum(sum(one.reads) for one in rounds)) / len(times), 3),
        "rounds": len(rounds),
        "cycles": len(times),
        "waits_per_cycle": round(sum(one.waits for one in rounds) / len(times), 3),
    }


def ratio(above: Sequence[Round], below: Sequence[Round]) -> Spread:
    """Of tokens a second, round by round."""
    return Spread.of([a.rate / b.rate for a, b in zip(above, below, strict=True)])
