"""From a chat job to its answers: template, tokens, constraint, parsing. Knows no wire format.

Rendering, tokenising and compiling grammars happen on a worker thread, decoding on the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ..errors import InvalidRequest
from ..llm import LLM
from ..results import FinishReason, Piece
from ..stream import Answer
from ..text import Tokenizer
from ..text.call_grammar import call_grammar
from ..text.grammar import Grammar, Grammars
from ..text.reply import ReplyParser, ToolFormat, begins_in_reasoning, detect_format, markers
from ..text.reply.events import Reasoning, ReplyEvent, ToolEnd
from ..text.reply.formats import THINK, THINK_END
from ..text.thinking import ThinkingBudget
from .jobs import ChatJob, Choice, Finished, JobEvent, OutputFormat
from .running import Answers
from .service import EngineService

__all__ = ["Chats", "Prompted", "output_grammar"]


@dataclass(frozen=True)
class Prompted:
    """A rendered prompt: its tokens, and whether it opens the reasoning."""

    tokens: list[int]
    in_reasoning: bool


class Chats:
    """Answers chat jobs with the model of a service."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def start(self, job: ChatJob) -> Answers:
        """Check a job and queue its answers.

        Raises:
            SelfdraftError: it is refused.
        """
        self._service.check_room(job.n)
        prompted, answers, writers = await asyncio.to_thread(self._prepare, job)
        return Answers(self._service, self._service.submit(answers), writers, len(prompted.tokens))

    async def count(self, job: ChatJob) -> int:
        """How many tokens the prompt of a job has."""
        return len((await asyncio.to_thread(self.prompt, job)).tokens)

    def prompt(self, job: ChatJob) -> Prompted:
        """Render and tokenise a job's messages.

        Raises:
            InvalidRequest: no template, or one that refuses the messages.
        """
        llm = self._service.llm
        if llm.template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        text = llm.template.render(
            job.messages,
            tools=job.tools if job.tool_choice.mode != "none" else None,
            enable_thinking=job.enable_thinking,
            continue_final=job.continue_final,
            **job.template_variables,
        )
        if job.continue_final:
            begun = str(job.messages[-1].get("content") or "")
            in_reasoning = begun.rfind(THINK) > begun.rfind(THINK_END)
        else:
            in_reasoning = begins_in_reasoning(text)
        return Prompted(llm.tokenizer.encode(text, special=True), in_reasoning)

    def _prepare(self, job: ChatJob) -> tuple[Prompted, list[Answer], list[_ChatWriter]]:
        llm = self._service.llm
        prompted = self.prompt(job)
        tools = job.tools if job.tool_choice.mode != "none" else ()
        assert llm.template is not None
        format = detect_format(llm.template.source)
        grammar = _bounded(llm, job, _grammar(llm, job, format, prompted.in_reasoning), prompted.in_reasoning)
        parser = partial(ReplyParser, format, tools, in_reasoning=prompted.in_reasoning)
        single = bool(tools) and not job.parallel_tool_calls
        answers, writers = [], []
        for choice in range(job.n):
            answer = llm.answer(
                prompted.tokens,
                job.params,
                choice=choice,
                keep=markers(format if tools else None),
                grammar=grammar,
                ends=_behind_call(parser()) if single else None,
                timed=job.timed,
            )
            answers.append(answer)
            writers.append(_ChatWriter(choice, answer, parser(), llm.tokenizer, single=single))
        return prompted, answers, writers


def _behind_call(parser: ReplyParser) -> Callable[[str], bool]:
    """Says of the text of an answer, piece by piece, whether a call has ended."""
    return lambda text: any(isinstance(event, ToolEnd) for event in parser.push(text))


def _grammar(llm: LLM, job: ChatJob, format: ToolFormat | None, in_reasoning: bool) -> Grammar | None:
    """What the answer is held to behind its reasoning, if anything.

    A choice of one tool asks for one call. Where tools may be called, JSON is asked for of answers that call none; but
    a grammar or an expression of the client's own is the whole answer.
    """
    name = job.tool_choice.name
    calls = partial(call_grammar, llm.grammars, llm.tokenizer, format, job.tools, name=name)
    if job.tool_choice.mode == "required":
        grammar = calls(several=job.parallel_tool_calls and name is None)
    elif job.output is None:
        return None
    else:
        grammar = output_grammar(llm.grammars, job.output)
        may_call = format is not None and job.tools and job.tool_choice.mode == "auto"
        if may_call and job.output.kind in ("json_object", "json_schema"):
            grammar = calls(several=job.parallel_tool_calls, strict=False).or_else(grammar)
    return grammar.after(THINK_END) if in_reasoning else grammar


def _bounded(llm: LLM, job: ChatJob, grammar: Grammar | None, in_reasoning: bool) -> Grammar | ThinkingBudget | None:
    """The same with the reasoning bounded, if a budget is asked for that comes before the end of the answer."""
    budget = job.template_variables.get("thinking_budget")
    if (
        budget is None
        or not llm.tokenizer.eos_ids
        or (job.params.max_tokens is not None and budget + 1 >= job.params.max_tokens)
    ):
        return grammar
    vocabulary = llm.loaded.model.vocab_size
    return ThinkingBudget(budget, llm.tokenizer, vocabulary, begun=in_reasoning, inner=grammar)


def output_grammar(grammars: Grammars, output: OutputFormat) -> Grammar:
    """The grammar of an output format.

    Raises:
        InvalidRequest: it cannot be enforced, with the reason.
    """
    match output.kind:
        case "json_object":
            return grammars.json_object()
        case "json_schema":
            return grammars.json_schema(output.schema or {})
        case "grammar":
            return grammars.lark(output.grammar or "")
        case "regex":
            return grammars.regex(output.grammar or "")


class _ChatWriter:
    """Cuts one answer into reasoning, content and calls; if it may hold a single call, up to that one's end."""

    def __init__(self, index: int, answer: Answer, parser: ReplyParser, tokenizer: Tokenizer, *, single: bool) -> None:
        self._index = index
        self._answer = answer
        self._parser = parser
        self._tokenizer = tokenizer
        self._single = single
        self._reasoning: list[str] = []
        self._ended: list[ToolEnd] = []

    def events(self, piece: Piece) -> Sequence[JobEvent]:
        events = self._parser.push(piece.text)
        if piece.result is not None:
            events = [*events, *self._parser.finish()]
        events = self._wanted(events)
        self._reasoning += [event.text for event in events if isinstance(event, Reasoning)]
        written: list[JobEvent] = []
        if events or piece.logprobs:
            written.append(Choice(self._index, events, piece.logprobs, piece.timings))
        return written if piece.result is None else [*written, self._finished(piece)]

    def _wanted(self, events: Sequence[ReplyEvent]) -> list[ReplyEvent]:
        wanted: list[ReplyEvent] = []
        for event in events:
            if self._single and self._ended:
                break
            wanted.append(event)
            if isinstance(event, ToolEnd):
                self._ended.append(event)
        return wanted

    def _reason(self, reason: FinishReason) -> Literal[FinishReason, "tool_calls"]:
        """A call that is not complete makes an answer one that broke off, whatever ended it."""
        if reason != "stop" or not self._ended:
            return reason
        return "tool_calls" if all(end.complete for end in self._ended) else "length"

    def _finished(self, piece: Piece) -> Finished:
        result = piece.result
        assert result is not None
        reasoning = "".join(self._reasoning)
        return Finished(
            index=self._index,
            reason=self._reason(result.finish_reason),
            stop=self._answer.text.stop,
            usage=result.usage,
            reasoning_tokens=len(self._tokenizer.encode(reasoning, special=False)) if reasoning else 0,
            timings=result.timings,
        )
