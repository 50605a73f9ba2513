"""Where a cycle's time goes: stages timed from outside.

MLX is lazy: a timer around a stage sees only the building of its graph, and all the work is paid where it is read. This
mode therefore evaluates at every stage border. That takes away overlap and fusion, so the stages add up to more than an
ordinary cycle; the shares are what to read, and the report says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from .ahead import Unread
from .batch import Batch
from .cycle import Choose, Cycle, Decision, Drafts, Flight, Outcome, Verified
from .row import Row

__all__ = ["ProfiledCycle"]

T = TypeVar("T")


class ProfiledCycle(Cycle):
    """A `Cycle` that times its stages. An ordinary cycle carries no trace of it.

    Attributes:
        seconds: by stage: head history, draft, verify, accept, commit, host (everything between the stages).
        cycles: how many were timed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds = dict.fromkeys(("head history", "draft", "verify", "accept", "commit", "host"), 0.0)
        self.cycles = 0

    def run(self, rows: Sequence[Row], choose: Choose, *, look_ahead: bool = False) -> list[int]:
        """Never looks ahead: a cycle inside another one's time would spoil both."""
        staged = sum(self.seconds.values())
        depths, whole = _timed(lambda: super(ProfiledCycle, self).run(rows, choose))
        self.seconds["host"] += whole - (sum(self.seconds.values()) - staged)
        self.cycles += 1
        return depths

    def draft(self, batch: Batch) -> Drafts:
        before = self.seconds["head history"]
        drafts, spent = _timed(lambda: super(ProfiledCycle, self).draft(batch), lambda d: (d.tokens, d.z, d.flaws))
        self.seconds["draft"] += spent - (self.seconds["head history"] - before)
        return drafts

    def commit_history(self, rows: Sequence[Row], unread: Unread | None = None) -> mx.array:
        return self._stage("head history", lambda: super(ProfiledCycle, self).commit_history(rows), lambda h: (h,))

    def verify(self, batch: Batch, drafts: Drafts) -> Verified:
        return self._stage(
            "verify", lambda: super(ProfiledCycle, self).verify(batch, drafts), lambda v: (v.hidden, v.logits)
        )

    def accept(self, batch: Batch, drafts: Drafts, verified: Verified) -> Decision:
        return self._stage(
            "accept", lambda: super(ProfiledCycle, self).accept(batch, drafts, verified), lambda d: d.arrays
        )

    def commit(self, flight: Flight, outcome: Outcome) -> None:
        self._stage(
            "commit",
            lambda: super(ProfiledCycle, self).commit(flight, outcome),
            lambda _: tuple(array for state in flight.batch.states for array in state.arrays()),
        )

    def report(self) -> str:
        """A table of stages, with the warning that belongs to it."""
        total = sum(self.seconds.values())
        lines = [
            "profile: evaluation was forced at every stage border, which makes a cycle slower; read the shares",
            *(
                f"  {stage:<13}{seconds / max(self.cycles, 1) * 1e3:9.2f} ms a cycle {seconds / max(total, 1e-12):7.1%}"
                for stage, seconds in self.seconds.items()
            ),
        ]
        return "\n".join(lines)

    def _stage(
        self, name: str, stage: Callable[[], T], arrays: Callable[[T], tuple[mx.array | None, ...]] | None = None
    ) -> T:
        result, spent = _timed(stage, arrays)
        self.seconds[name] += spent
        return result


def _timed(stage: Callable[[], T], arrays: Callable[[T], tuple[mx.array | None, ...]] | None = None) -> tuple[T, float]:
    begin = time.perf_counter()
    result = stage()
    if arrays:
        mx.eval([array for array in arrays(result) if array is not None])
    return result, time.perf_counter() - begin
