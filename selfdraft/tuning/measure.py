"""One timed decoding, and what several of them say together. Knows the engine; nothing of files, text or processes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..engine import Engine, Request
from ..params import SamplingParams

__all__ = ["PROMPTS", "Spread", "Tally", "decode"]

PROMPTS = (
    "Write a short story about a penguin.",
    "Write a Python function that counts the words in a string.",
    "Write a short email to Priya about the meeting on Friday. My name is Sam.",
    "Tell me about the climate and the economy of Ecuador.",
)

SEED = 0


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(low, middle, high)

    @property
    def width(self) -> float:
        """Between the quartiles."""
        return self.high - self.low

    def rounded(self, digits: int = 2) -> dict[str, float]:
        """For a report."""
        return {name: round(getattr(self, name), digits) for name in ("median", "low", "high")}


@dataclass
class Tally:
    """Sums over decodings: seconds and tokens of their cycles, prefill left out; drafts by position.

    Attributes:
        prompt_seconds: from the first prefill chunk to the first token.
    """

    tokens: int = 0
    seconds: float = 0.0
    cycles: int = 0
    prompt_seconds: float = 0.0
    tried: Sequence[int] = ()
    accepted: Sequence[int] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.cycles + other.cycles,
            self.prompt_seconds + other.prompt_seconds,
            _sum(self.tried, other.tried),
            _sum(self.accepted, other.accepted),
        )

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def acceptance(self) -> list[float]:
        """By position, given that the drafts before were accepted."""
        return [a / t for a, t in zip(self.accepted, self.tried, strict=True) if t]


def decode(engine: Engine, prompts: Iterable[Sequence[int]], depth: int, tokens: int) -> Tally:
    """Decode prompts greedily, one after another, each to `tokens` tokens whatever they are.

    Raises:
        InvalidRequest: a depth the head does not allow, a prompt that does not fit.
        NonFiniteLogits: the model broke down.
    """
    params = SamplingParams(depth=depth, max_tokens=tokens, temperature=0, seed=SEED, ignore_eos=True).resolved({})
    total = Tally()
    for prompt in prompts:
        row = engine.add(Request(prompt, params))
        for _ in engine.run(row):
            pass
        done = row.statistics
        emitted = sum(done.emitted.values()) - done.emitted["prefill"]
        total += Tally(emitted, done.decode_seconds, done.cycles, done.prompt_seconds, done.tried, done.accepted)
    return total


def _sum(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Position by position; the shorter one has zeros where it ends."""
    length = max(len(one), len(other))
    padded = [[*each, *[0] * (length - len(each))] for each in (one, other)]
    return [a + b for a, b in zip(*padded, strict=True)]
