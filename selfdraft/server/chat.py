"""From a chat job to its answers: template, tokens, constraint, parsing. Knows no wire format.

Rendering, tokenising and compiling grammars happen on a worker thread, decoding on the engine's.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Literal

from ..errors import InvalidRequest
from ..llm import LLM
from ..prompts import Prompted
from ..results import FinishReason, Piece
from ..stream import Answer
from ..text import RowText
from ..text.call_grammar import call_grammar
from ..text.grammar import Grammar, Grammars
from ..text.reply import ReplyParser, ToolFormat, begins_in_reasoning, detect_format, markers
from ..text.reply.events import ReplyEvent, ToolEnd, merged
from ..text.reply.formats import THINK, THINK_END
from ..text.thinking import ThinkingBudget
from .jobs import ChatJob, Choice, Finished, JobEvent, OutputFormat
from .pictures import Pictures
from .running import Answers
from .service import EngineService

__all__ = ["Chats", "output_grammar"]


class Chats:
    """Answers chat jobs with the model of a service.

    Args:
        pictures: reads the images of jobs.
    """

    def __init__(self, service: EngineService, pictures: Pictures) -> None:
        self._service = service
        self._pictures = pictures

    async def start(self, job: ChatJob) -> Answers:
        """Check a job and queue its answers.

        Raises:
            SelfdraftError: it is refused.
        """
        self._service.check_room(job.n)
        job = await self._pictures.read(job, blind=self._service.llm.blind)
        prompted, answers, writers = await asyncio.to_thread(self._prepare, job)
        return Answers(self._service, self._service.submit(answers), writers, len(prompted.tokens))

    async def tokens(self, job: ChatJob) -> Sequence[int]:
        """The prompt of a job that is not to be answered.

        Raises:
            InvalidRequest: no template, or one that refuses the messages; an image that is refused.
        """
        job = await self._pictures.read(job, blind=self._service.llm.blind)
        return (await asyncio.to_thread(self.prompt, job, answered=False)).tokens

    def prompt(self, job: ChatJob, *, answered: bool = True) -> Prompted:
        """Render and tokenise the messages of a job whose images are read.

        Args:
            answered: see `Prompts.chat`.

        Raises:
            InvalidRequest: no template, or one that refuses the messages.
        """
        llm = self._service.llm
        if llm.template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        return llm.prompts.chat(
            job.messages,
            scope=job.scope,
            answered=answered,
            tools=job.tools if job.tool_choice.mode != "none" else None,
            enable_thinking=job.enable_thinking,
            continue_final=job.continue_final,
            **job.template_variables,
        )

    def _prepare(self, job: ChatJob) -> tuple[Prompted, list[Answer], list[_ChatWriter]]:
        llm = self._service.llm
        prompted = self.prompt(job)
        in_reasoning = _in_reasoning(job, prompted)
        tools = job.tools if job.tool_choice.mode != "none" else ()
        assert llm.template is not None
        format = detect_format(llm.template.source)
        grammar = _bounded(llm, job, _grammar(llm, job, format, in_reasoning), in_reasoning)
        single = bool(tools) and not job.parallel_tool_calls
        answers, writers = [], []
        for choice in range(job.n):
            parser = ReplyParser(format, tools, in_reasoning=in_reasoning)
            writer = _ChatWriter(choice, parser, single=single)
            answer = llm.answer(
                prompted,
                job.params,
                choice=choice,
                keep=markers(format if tools else None),
                grammar=grammar,
                ends=writer.read if single else None,
                timed=job.timed,
            )
            writer.text = answer.text
            answers.append(answer)
            writers.append(writer)
        return prompted, answers, writers


def _in_reasoning(job: ChatJob, prompted: Prompted) -> bool:
    """Whether the answer begins inside the reasoning."""
    if not job.continue_final:
        return begins_in_reasoning(prompted.text or "")
    begun = str(job.messages[-1].get("content") or "")
    return begun.rfind(THINK) > begun.rfind(THINK_END)


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
    """Cuts one answer into reasoning, content and calls; if it may hold a single call, up to that one's end.

    Attributes:
        text: of the answer; set before the first piece.
    """

    text: RowText

    def __init__(self, index: int, parser: ReplyParser, *, single: bool) -> None:
        self._index = index
        self._parser = parser
        self._single = single
        self._ended: list[ToolEnd] = []
        self._read: deque[tuple[int, Sequence[ReplyEvent]]] = deque()  # length of a text, and what it says

    def read(self, text: str) -> bool:
        """Take the text that comes next. A row whose end depends on it calls this, as it decodes.

        Returns:
            Whether the answer is at its end.
        """
        self._read.append((len(text), self._wanted(self._parser.push(text))))
        return self._single and bool(self._ended)

    def events(self, piece: Piece) -> Sequence[JobEvent]:
        if piece.text and not self._single:
            self.read(piece.text)
        events: list[ReplyEvent] = []
        size = len(piece.text)
        while size > 0:
            length, said = self._read.popleft()
            size -= length
            events += said
        if piece.result is not None:
            events += self._wanted(self._parser.finish())
        written: list[JobEvent] = []
        if events or piece.logprobs:
            written.append(Choice(self._index, merged(events), piece.logprobs, piece.timings))
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

    def _reasoned(self) -> int:
        """How many tokens were reasoning: those that begin in it, between the markers.

        A token across a border belongs to the side on which it begins. Reasoning that never ends reaches to the end of
        the answer, a stop included.
        """
        offsets = self.text.offsets  # they only rise
        return sum(
            (len(offsets) if end is None else bisect_left(offsets, end)) - bisect_left(offsets, begin)
            for begin, end in self._parser.thought
        )

    def _finished(self, piece: Piece) -> Finished:
        result = piece.result
        assert result is not None
        return Finished(
            index=self._index,
            reason=self._reason(result.finish_reason),
            stop=self.text.stop,
            usage=result.usage,
            reasoning_tokens=self._reasoned(),
            timings=result.timings,
        )
