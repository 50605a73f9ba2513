"""OpenAI's completions of bare prompts, text or tokens. Knows that format, both ways; nothing of chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pydantic import Field

from ...errors import InvalidRequest
from ...params import MAX_LOGPROBS, SamplingParams
from ...prompts import LOCAL
from ...results import TokenLogprob
from ...text.reply.events import Content
from ..jobs import Choice, Finished, JobEvent, OutputFormat
from . import limits
from .failures import describe
from .limits import at_most
from .openai_common import StreamOptions, error_body, error_object, finite, usage
from .sampling import Count, SamplingFields, output_format
from .wire import COMMENT, Envelope, sse

__all__ = [
    "CompletionEvent",
    "CompletionJob",
    "CompletionRequest",
    "CompletionStream",
    "Echo",
    "collect",
    "error_body",
    "to_job",
]


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    model: str
    prompt: str | list[str] | list[Count] | list[list[Count]]
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None
    timings_per_token: bool | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionJob:
    """Prompts to go on from, checked.

    Attributes:
        prompts: each a text, or token ids.
        n: answers to each; answer `i` belongs to prompt `i // n`.
        echo: an `Echo` is wanted before an answer's first Choice; with scores if `params.logprobs` is set.
        only_prompt: nothing is to be emitted behind it.
        timed: a Choice is to carry the figures so far.
        scope: whose it is; see `Prompted`.
    """

    prompts: Sequence[str | Sequence[int]]
    params: SamplingParams
    n: int = 1
    echo: bool = False
    only_prompt: bool = False
    output: OutputFormat | None = None
    timed: bool = False
    scope: str = LOCAL


@dataclass(frozen=True)
class Echo:
    """The prompt of answer `index`, for a job with `echo`.

    Attributes:
        tokens: the text of each token.
        logprobs: the score of each; the first has none, nothing comes before it.
    """

    index: int
    text: str
    tokens: Sequence[str] = ()
    logprobs: Sequence[TokenLogprob | None] | None = None


CompletionEvent = Echo | JobEvent


def to_job(request: CompletionRequest) -> CompletionJob:
    """What the request asks for.

    Raises:
        InvalidRequest: something that cannot be done. RequestTooLarge: too many prompts.
    """
    if request.suffix:
        raise InvalidRequest("suffix is not supported: this model writes forward only; leave it out", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("best_of must equal n: all answers are returned", param="best_of")
    prompts = _prompts(request.prompt)
    if not prompts or not all(prompts):
        raise InvalidRequest("prompt must not be empty", param="prompt")
    at_most(prompts, limits.MAX_PROMPTS, "prompt", "prompts")
    only_prompt = request.max_tokens == 0
    if only_prompt and not request.echo:
        raise InvalidRequest("max_tokens must be at least 1; 0 is possible with echo only", param="max_tokens")
    return CompletionJob(
        prompts=prompts,
        params=request.sampling(max_tokens=1 if only_prompt else request.max_tokens, logprobs=request.logprobs),
        n=request.n or 1,
        echo=bool(request.echo),
        only_prompt=only_prompt,
        output=output_format(request.response_format, "response_format"),
        timed=bool(request.stream and request.timings_per_token),
    )


def _prompts(prompt: str | Sequence[Any]) -> list[str | Sequence[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


@dataclass
class _Scores:
    """The `logprobs` object of a choice, in the making. Offsets count characters of its text, the echo included."""

    wanted: int | None
    begin: int = 0  # where the answer begins in the text
    body: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clear()

    def add(self, token: str, score: TokenLogprob | None) -> None:
        """One token more."""
        self.body["tokens"].append(token)
        self.body["token_logprobs"].append(None if score is None else finite(score.logprob))
        self.body["text_offset"].append(0 if score is None else self.begin + score.offset)
        if score is None:
            self.body["top_logprobs"].append(None)
            return
        # The chosen token is always among them, as scorers expect; of equal texts the likeliest counts.
        top: dict[str, float] = {}
        for text, logprob in [*[(text, value) for _, text, value, _ in score.top], (token, score.logprob)]:
            top.setdefault(text, finite(logprob))
        self.body["top_logprobs"].append(top)

    def echo(self, echo: Echo) -> None:
        """The tokens of the prompt."""
        for token, score in zip(echo.tokens, echo.logprobs or (), strict=False):
            self.add(token, score)
        self.begin = len(echo.text)

    def take(self) -> dict[str, list[Any]] | None:
        """What was added since the last time; None if no scores are wanted."""
        body = self.body
        self._clear()
        return None if self.wanted is None else body

    def _clear(self) -> None:
        self.body = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class CompletionStream:
    """Answers as chunks (see `wire.Encoder`); `event` takes an Echo too."""

    def __init__(self, request: CompletionRequest, envelope: Envelope) -> None:
        self._request = request
        self._envelope = envelope
        self._scores: dict[int, _Scores] = {}
        self._finished: dict[int, Finished] = {}
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)

    def start(self) -> list[str]:
        """Nothing."""
        return []

    def event(self, event: CompletionEvent) -> list[str]:
        """Text, or the finish reason."""
        scores = self._scores.setdefault(event.index, _Scores(self._request.logprobs))
        if isinstance(event, Finished):
            self._finished[event.index] = event
            choice = _choice(event.index, "", None, _finish_reason(event))
            return [sse(self._body([choice], timings=asdict(event.timings)))]
        text = _add(event, scores)
        if not text and not scores.body["tokens"]:
            return []
        extra = {"timings": asdict(event.timings)} if isinstance(event, Choice) and event.timings else {}
        return [sse(self._body([_choice(event.index, text, scores.take())], **extra))]

    def done(self) -> list[str]:
        """Usage, if it was asked for, and the end mark."""
        blocks = []
        if self._with_usage:
            blocks.append(sse({**self._body([]), "usage": _usage(self._finished, self._request)}))
        return [*blocks, sse("[DONE]")]

    def error(self, exception: BaseException) -> list[str]:
        """An error object in place of a chunk, and the end mark."""
        return [sse({"error": error_object(describe(exception))}), sse("[DONE]")]

    def keepalive(self) -> str:
        """A comment."""
        return COMMENT

    def _body(self, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        if self._with_usage:
            extra["usage"] = None
        return {**_head(self._envelope), "choices": choices, **extra}


def collect(events: Iterable[CompletionEvent], request: CompletionRequest, envelope: Envelope) -> dict[str, Any]:
    """The whole response, from all events.

    Returns:
        The body; `timings` stands beside `choices` if there is one answer, else in each of them.
    """
    texts: dict[int, list[str]] = {}
    scores: dict[int, _Scores] = {}
    finished: dict[int, Finished] = {}
    for event in events:
        if isinstance(event, Finished):
            finished[event.index] = event
        else:
            own = scores.setdefault(event.index, _Scores(request.logprobs))
            texts.setdefault(event.index, []).append(_add(event, own))
    choices = []
    for index, end in sorted(finished.items()):
        own = scores.get(index, _Scores(request.logprobs))
        choices.append(_choice(index, "".join(texts.get(index, ())), own.take(), _finish_reason(end)))
    body = {**_head(envelope), "choices": choices, "usage": _usage(finished, request)}
    if len(choices) == 1:
        body["timings"] = asdict(next(iter(finished.values())).timings)
    else:
        for choice in choices:
            choice["timings"] = asdict(finished[choice["index"]].timings)
    return body


def _add(event: Echo | Choice, scores: _Scores) -> str:
    """Note an event's scores; its text."""
    if isinstance(event, Echo):
        scores.echo(event)
        return event.text
    for score in event.logprobs or ():
        scores.add(score.token, score)
    return "".join(reply.text for reply in event.events if isinstance(reply, Content))


def _choice(index: int, text: str, logprobs: dict[str, list[Any]] | None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _finish_reason(end: Finished) -> str:
    return "stop" if end.reason in ("stop", "tool_calls") else "length"


def _usage(finished: dict[int, Finished], request: CompletionRequest) -> dict[str, Any]:
    n = request.n or 1
    prompts = {index // n: end.usage.prompt_tokens for index, end in finished.items()}
    return usage(finished.values(), prompts.values())


def _head(envelope: Envelope) -> dict[str, Any]:
    return {
        "id": f"cmpl-{envelope.code}",
        "object": "text_completion",
        "created": envelope.created,
        "model": envelope.model,
    }
