"""What a generation returns. One schema for the command line, Python and the server; imports no MLX."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["SCHEMA_VERSION", "FinishReason", "Generation", "Piece", "Timings", "TokenLogprob", "Usage"]

SCHEMA_VERSION = 1

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Usage:
    """Token counts. `completion_tokens` counts an emitted EOS too; `cached_tokens` of the prompt were not forwarded."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Where time and forwards went.

    Attributes:
        prompt_ms: wall time from the row's first prefill chunk to its first token, milliseconds.
        decode_ms: wall time of its cycles, milliseconds.
        tokens_per_second: tokens emitted by cycles / decode time.
        cycles: rounds of draft, verify, accept, commit; a depth-0 step is a cycle.
        tokens_per_cycle: tokens emitted by cycles / cycles; the token that prefill yields is left out.
        acceptance_per_position: accepted_i / tried_i, given that the drafts before i were accepted.
        drafts_tried, drafts_accepted: the counts behind it, per position.
        emitted: tokens by kind: prefill, draft, correction, bonus, and plain (a depth-0 cycle's token).
        trunk_forwards: prefill chunks (the lone last prompt token is one) + cycles.
        trunk_replays: trunk forwards beyond these, repeated to repair a rejection. Always 0 here, and counted.
    """

    prompt_ms: float
    decode_ms: float
    tokens_per_second: float
    cycles: int
    tokens_per_cycle: float
    acceptance_per_position: list[float]
    drafts_tried: list[int]
    drafts_accepted: list[int]
    emitted: dict[str, int]
    trunk_forwards: int
    trunk_replays: int


@dataclass(frozen=True)
class TokenLogprob:
    """Raw log-softmax of the trunk at one token, before penalties and temperature.

    Attributes:
        token: its text; part of a character is written bytes:\\xe2\\x80.
        top: (token id, text, logprob, bytes) of the most likely tokens, most likely first.
        bytes: the bytes of its text, which of part of a character are no text.
        offset: where it begins in the text, in characters; inside a character, where that begins.
    """

    token_id: int
    token: str
    logprob: float
    top: list[tuple[int, str, float, list[int]]]
    bytes: list[int]
    offset: int = 0


@dataclass(frozen=True)
class Generation:
    """One finished answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: list[TokenLogprob] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The object `run --json` prints."""
        body: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "usage": asdict(self.usage),
            "timings": asdict(self.timings),
        }
        if self.logprobs is not None:
            body["logprobs"] = [asdict(entry) for entry in self.logprobs]
        return body


@dataclass(frozen=True)
class Piece:
    """A step of a streamed answer: text that is ready, the ids emitted since the last piece.

    A piece's ids may be ahead of its text (a character or a possible stop string still incomplete).
    The last piece carries `result`, the finished generation with the figures; the others carry the figures so far in
    `timings` if they were asked for.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    result: Generation | None = None
    timings: Timings | None = None
