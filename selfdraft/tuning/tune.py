"""Which depth pays for a model on this machine: candidates in turn, each run in a process of its own. Loads no model.

A depth is kept only if its median beats that of plain decoding by more than the wider of both spreads (between the
quartiles of the rounds); of those that do, the fastest.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from ..engine import DepthStart
from ..errors import SelfdraftError
from .measure import SEED, Spread, Tally

__all__ = ["Candidate", "Tuning", "describe", "tune", "winner"]

Tell = Callable[[str], None]


@dataclass
class Candidate:
    """A depth, 0 being plain decoding, and its runs, one a round."""

    depth: int
    runs: list[Tally] = field(default_factory=list)

    @property
    def rates(self) -> Spread:
        """Tokens a second."""
        return Spread.of([run.rate for run in self.runs])

    @property
    def total(self) -> Tally:
        """All runs together."""
        return reduce(add, self.runs)

    @property
    def cycle_seconds(self) -> float:
        """Of one cycle: the median of the rounds."""
        return Spread.of([run.seconds / run.cycles for run in self.runs]).median

    def beats(self, plain: Candidate) -> bool:
        """Whether it is faster by more than the spread."""
        return self.rates.median - plain.rates.median > max(self.rates.width, plain.rates.width)


def winner(candidates: Sequence[Candidate]) -> Candidate:
    """The fastest that beats the first, plain decoding; else the first."""
    plain = candidates[0]
    beating = [candidate for candidate in candidates[1:] if candidate.beats(plain)]
    return max(beating, key=lambda candidate: candidate.rates.median, default=plain)


@dataclass
class Tuning:
    """What was measured of a model.

    Attributes:
        belongs_to: see `tuned.belongs_to`.
        tokens: decoded a prompt.
        candidates: by depth, from 0 on.
    """

    model: str
    belongs_to: dict[str, Any]
    tokens: int
    candidates: list[Candidate]

    @property
    def chosen(self) -> Candidate:
        """What `depth=auto` is to begin with."""
        return winner(self.candidates)

    @property
    def start(self) -> DepthStart:
        """The same for the engine."""
        drafts = reduce(add, (candidate.total for candidate in self.candidates))
        costs = {candidate.depth: candidate.cycle_seconds for candidate in self.candidates}
        return DepthStart(self.chosen.depth, costs, drafts.acceptance)

    @property
    def verdict(self) -> str:
        """In a sentence."""
        plain, chosen = self.candidates[0], self.chosen
        if chosen is plain:
            return "no depth beats plain decoding here by more than the spread: auto begins without drafts"
        gain = chosen.rates.median / plain.rates.median
        return f"depth {chosen.depth} decodes {gain:.2f} times as fast as plain decoding here: auto begins with it"

    def report(self) -> dict[str, Any]:
        """Everything, for JSON."""
        plain = self.candidates[0].rates.median
        return {
            "schema_version": 1,
            "model": self.model,
            "belongs_to": self.belongs_to,
            "seed": SEED,
            "tokens": self.tokens,
            "rounds": len(self.candidates[0].runs),
            "candidates": [
                {
                    "depth": candidate.depth,
                    "tokens_per_second": candidate.rates.rounded(),
                    "by_round": [round(run.rate, 2) for run in candidate.runs],
                    "ratio": round(candidate.rates.median / plain, 3),
                    "tokens_per_cycle": round(candidate.total.tokens / candidate.total.cycles, 3),
                    "cycle_ms": round(candidate.cycle_seconds * 1e3, 3),
                    "acceptance": [round(rate, 4) for rate in candidate.total.acceptance],
                    "beats_plain": candidate.depth > 0 and candidate.beats(self.candidates[0]),
                }
                for candidate in self.candidates
            ],
            "chosen": self.chosen.depth,
            "verdict": self.verdict,
        }


def describe(model: str, adapter: Path | None = None) -> dict[str, Any]:
    """What a model is, asked of a process that loads it: `belongs_to`, `max_depth`, `notes`.

    Raises:
        SelfdraftError: it cannot be loaded, or has no head: then there is nothing to tune.
    """
    found = _ask(_job(model, adapter, 0, 0))
    if not found["max_depth"]:
        reason = " ".join(found["notes"]) or "it has no MTP head"
        raise SelfdraftError(f"nothing to tune in {model}: it decodes plainly ({reason})")
    return found


def tune(
    model: str,
    found: dict[str, Any],
    *,
    max_depth: int,
    rounds: int,
    tokens: int,
    pause: float,
    adapter: Path | None = None,
    tell: Tell = lambda line: None,
) -> Tuning:
    """Measure plain decoding and depths up to `max_depth`; keeps nothing.

    Args:
        found: see `describe`.
        rounds: runs of each candidate; every second round goes backwards, so that warming up favours none.
        pause: seconds before each run, for the machine to settle.
        tell: called with a line for each run.

    Raises:
        SelfdraftError: a run failed.
    """
    depths = range(min(max_depth, found["max_depth"]) + 1)
    candidates = [Candidate(depth) for depth in depths]
    for number in range(rounds):
        for candidate in candidates if number % 2 == 0 else candidates[::-1]:
            time.sleep(pause)
            run = Tally(**_ask(_job(model, adapter, candidate.depth, tokens)))
            candidate.runs.append(run)
            tell(f"round {number + 1} of {rounds}, depth {candidate.depth}: {run.rate:.1f} tokens a second")
    return Tuning(model, found["belongs_to"], tokens, candidates)


def _job(model: str, adapter: Path | None, depth: int, tokens: int) -> dict[str, Any]:
    return {"model": model, "adapter": str(adapter) if adapter else None, "depth": depth, "tokens": tokens}


def _ask(job: dict[str, Any]) -> dict[str, Any]:
    """Have a job done in a process of its own; Ctrl-C ends it too."""
    command = [sys.executable, "-m", f"{__package__}.worker", json.dumps(job)]
    # In a session of its own, Ctrl-C does not make it speak up as well.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate()
        except BaseException:
            process.kill()
            raise
    try:
        report: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    except (ValueError, IndexError):
        last = (err.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise SelfdraftError(f"measuring depth {job['depth']} failed ({_ended(process.returncode)}): {last}") from None
    if "error" in report:
        raise SelfdraftError(report["error"])
    return report


def _ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
