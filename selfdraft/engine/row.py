"""A request and the row that decodes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from ..errors import ContextOverflow, InvalidRequest
from ..kernels.small_arrays import fresh
from ..params import MAX_LOGPROBS, SamplingParams
from ..results import FinishReason
from ..state import Room, RowState
from . import noise
from .constraint import Constraint
from .depth import DepthPolicy
from .inputs import Inputs
from .modes import EngineMode, RowMode
from .sampling import History
from .session import Boundary, Cut, Session
from .statistics import RowStatistics

__all__ = ["Pending", "Request", "Row", "TokenScores", "validate"]

Progress = Callable[[int, int], None]
TextStop = Callable[[Sequence[int]], int | None]


@dataclass(frozen=True)
class Request:
    """What a row is asked to do.

    Attributes:
        prompt: token ids, at least one.
        params: resolved sampling parameters.
        stop_ids: end tokens of the model; `params.ignore_eos` switches them off.
        choice: which of several answers to the same prompt this is; part of the noise key.
        text_stop: called with newly emitted ids; returns how many of them belong to the answer when a stop string
            completed inside them, else None. The row ends there.
        constraint: what it may emit; it is moved on by the row, so each request needs its own. Its sentence ends with
            an end token, even before `params.min_tokens` if nothing else is allowed, and whatever `params.ignore_eos`
            says: nothing follows it.
        on_prefill: called during prefill with (prompt tokens forwarded, prompt tokens), several times a chunk: the
            share of layers done counts as tokens. It may cancel the row.
        prompt_logprobs: None for none; N for the scores of the prompt's own tokens, each with the N most likely.
        only_prompt: emit nothing: the row ends behind its prompt, its reason "length".
        session: where the row may go on from and leaves boundaries; not with `prompt_logprobs`, which need every
            token forwarded.
        mode: how its buffers are made; None for as the engine makes them.
        inputs: what its prompt has beside ids; the model must take such.
    """

    prompt: Sequence[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    choice: int = 0
    text_stop: TextStop | None = None
    constraint: Constraint | None = None
    on_prefill: Progress | None = None
    prompt_logprobs: int | None = None
    only_prompt: bool = False
    session: Session | None = None
    mode: EngineMode | None = None
    inputs: Inputs | None = None


@dataclass(frozen=True)
class TokenScores:
    """Raw log-probability of a token, and the most likely (id, log-probability) pairs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]

    def best(self, count: int) -> TokenScores:
        """With the `count` most likely tokens only: rows of a batch may ask for different numbers."""
        return replace(self, top=self.top[:count])


@dataclass
class Pending:
    """Pairs (h_{i-1}, t_i) of emitted tokens that the head has not seen yet.

    Attributes:
        hidden: [m, H]; rows behind the tokens mean nothing.
        tokens: at most m.
        on_device: the tokens as they lie on the device, [m], if they do.
    """

    hidden: mx.array
    tokens: list[int]
    on_device: mx.array | None = None

    def extend(self, hidden: mx.array, tokens: list[int]) -> None:
        """Append newer pairs."""
        self.hidden = mx.concatenate([self.hidden[: len(self.tokens)], hidden])
        self.tokens, self.on_device = self.tokens + tokens, None

    def padded(self, width: int) -> tuple[mx.array, mx.array]:
        """Hidden [width, H] and tokens [width], for a width of at least the tokens."""
        hidden, tokens = self.hidden, self.on_device
        if tokens is None:
            tokens = fresh(self.tokens, mx.uint32)
        missing = width - hidden.shape[0]
        if missing:
            hidden = mx.pad(hidden, [(0, missing), (0, 0)]) if missing > 0 else hidden[:width]
        missing = width - tokens.shape[0]
        if missing:
            tokens = mx.pad(tokens, [(0, missing)]) if missing > 0 else tokens[:width]
        return hidden, tokens


@dataclass(eq=False)
class Row:
    """One sequence being decoded.

    Between cycles: tokens t_0..t_L (`last` = t_L), `state` for t_0..t_{L-1}, and in `pending` the pairs up to
    (h_{L-1}, t_L) that the head's history lacks.

    Attributes:
        emitted, scores: tokens so far, and their scores if the request asks for them.
        prompt_scores: likewise of the prompt's tokens but the first, as far as it is forwarded.
        mode, room: how large its buffers are made.
        drafts: whether its head's history is kept; a row fixed at depth 0 needs none, nor one of a single token,
            unless others go on from it.
        tail: during prefill, the trunk's hidden of the newest token in `state`, [1, H]; its pair is formed with the
            token that comes next.
        cuts: how the tokens in `state` were forwarded, as far as that was in prefill or before this row.
        draws: noise counters used up, for rows whose noise must never repeat.
        prefill_begin: clock time of its first prefill chunk.
        prefilled: prompt tokens forwarded so far.
    """

    request: Request
    params: SamplingParams
    state: RowState
    policy: DepthPolicy
    stream: noise.Stream
    history: History | None
    mode: RowMode
    room: Room
    drafts: bool
    emitted: list[int] = field(default_factory=list)
    scores: list[TokenScores] = field(default_factory=list)
    prompt_scores: list[TokenScores] = field(default_factory=list)
    pending: Pending | None = None
    tail: mx.array | None = None
    cuts: tuple[Cut, ...] = ()
    statistics: RowStatistics = field(default_factory=RowStatistics)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    draws: int = 0
    prefill_begin: float | None = None
    prefilled: int = 0

    @property
    def done(self) -> bool:
        """Whether it left the engine."""
        return self.finish_reason is not None or self.error is not None

    @property
    def last(self) -> int:
        """The newest emitted token, not yet forwarded through the trunk."""
        return self.emitted[-1]

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens - len(self.emitted)

    @property
    def stop_ids(self) -> frozenset[int]:
        """End tokens that end this row."""
        ignored = self.params.ignore_eos and self.request.constraint is None
        return frozenset() if ignored else self.request.stop_ids

    @property
    def coupled(self) -> bool:
        """Greedy and seeded rows use coupled acceptance, so that their text does not depend on depth."""
        return self.params.temperature == 0 or self.params.seed is not None

    @property
    def counter(self) -> int:
        """Where this row's noise for the next cycle starts (see noise.py)."""
        return len(self.emitted) if self.coupled else self.draws

    def go_on_from(self, boundary: Boundary) -> None:
        """Begin behind a known prefix of the prompt, which is not forwarded again."""
        self.statistics.restored_tokens += boundary.state.length - self.state.length
        self.state, self.tail, self.cuts = boundary.state, boundary.hidden, boundary.cuts
        self.report_prefill(boundary.state.length)

    def report_prefill(self, tokens: int) -> None:
        """Tell whoever asked that `tokens` tokens of the prompt are forwarded."""
        if tokens > self.prefilled:
            self.prefilled = tokens
            if self.request.on_prefill:
                self.request.on_prefill(tokens, len(self.request.prompt))

    def describe(self) -> str:
        """One line for the log."""
        figures = self.statistics.timings()
        acceptance = " ".join(f"{rate:.3f}" for rate in figures.acceptance_per_position) or "-"
        kinds = " ".join(f"{kind}={count}" for kind, count in figures.emitted.items() if count)
        return (
            f"prompt_tokens={len(self.request.prompt)} restored_tokens={self.statistics.restored_tokens} "
            f"emitted_tokens={len(self.emitted)} cycles={figures.cycles} mode={self.mode} "
            f"tokens_per_cycle={figures.tokens_per_cycle:.2f} acceptance=[{acceptance}] {kinds} "
            f"rope_position_of_last={self.state.length + self.state.rope_delta} "
            f"tokens_per_second={figures.tokens_per_second:.1f} "
            f"finish={self.finish_reason}"
        )


def validate(request: Request, *, vocab_size: int, context_length: int, max_depth: int) -> SamplingParams:
    """Check a request against a model.

    Returns:
        Its parameters, `max_tokens` cut to what the context leaves.

    Raises:
        ContextOverflow: the prompt leaves no room for a token.
        InvalidRequest: an empty prompt, a token or biased id outside the vocabulary, a depth the head does not allow,
            a constraint without end tokens, a number of prompt scores out of range.
    """
    params, prompt = request.params, request.prompt
    if len(prompt) == 0:
        raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
    if outside := [token for token in prompt if not 0 <= token < vocab_size]:
        raise InvalidRequest(
            f"token id {outside[0]} is outside the model's vocabulary of {vocab_size}: a tokenizer of another model "
            "makes such ids",
            param="prompt",
        )
    if outside := [token for token in params.logit_bias or {} if token >= vocab_size]:
        raise InvalidRequest(
            f"logit_bias: token id {outside[0]} is outside the vocabulary of {vocab_size}", param="logit_bias"
        )
    if request.inputs is not None and len(request.inputs) != len(prompt):
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens, and what comes with it is for {len(request.inputs)}: make both anew",
            param="prompt",
        )
    if request.constraint is not None and not request.stop_ids:
        raise InvalidRequest("a grammar needs an end token to end its sentence, and this checkpoint names none")
    if request.prompt_logprobs is not None and not 0 <= request.prompt_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs must be a whole number from 0 to {MAX_LOGPROBS}, not {request.prompt_logprobs}",
            param="prompt_logprobs",
        )
    room = context_length - len(prompt)
    least = 0 if request.only_prompt else 1
    if room < least:
        raise ContextOverflow(  # in OpenAI's words, by which clients tell this refusal from others
            f"this model's maximum context length is {context_length} tokens and the prompt has {len(prompt)}: "
            f"shorten it by {least - room}",
            param="prompt",
        )
    if params.depth != "auto" and params.depth > max_depth:
        allowed = f"0..{max_depth}" if max_depth else "0 only: no MTP head is in use"
        raise InvalidRequest(f"depth {params.depth} is not possible here; allowed: {allowed}, or auto", param="depth")
    assert params.max_tokens is not None
    return params.with_max_tokens(min(params.max_tokens, max(room, 1)))
