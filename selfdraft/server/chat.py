"""From a chat job to its answers: template, tokens, constraint, parsing. Knows no wire format.

Rendering, tokenising and compiling grammars happen on a worker thread, decoding on the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidRequest
from ..llm import LLM
from ..results import Piece
from ..stream import Answer
from ..text import Tokenizer
from ..text.call_grammar import call_grammar
from ..text.grammar import Grammar, Grammars
from ..text.reply import ReplyParser, ToolFormat, begins_in_reasoning, detect_format, markers
from ..text.reply.events import Reasoning, ToolStart
from ..text.reply.formats import THINK, THINK_END
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
        grammar = _grammar(llm, job, format, prompted.in_reasoning)
        answers, writers = [], []
        for choice in range(job.n):
            keep = markers(format if tools else None)
            answer = llm.answer(prompted.tokens, job.params, choice=choice, keep=keep, grammar=grammar)
            parser = ReplyParser(format, tools, in_reasoning=prompted.in_reasoning)
            answers.append(answer)
            writers.append(_ChatWriter(choice, answer, parser, llm.tokenizer))
        return prompted, answers, writers


def _grammar(llm: LLM, job: ChatJob, format: ToolFormat | None, in_reasoning: bool) -> Grammar | None:
    """What the answer is held to behind its reasoning, if anything."""
    if job.tool_choice.mode == "required":
        grammar = llm.grammars.lark(
            call_grammar(format, job.tools, name=job.tool_choice.name, several=job.parallel_tool_calls)
        )
    elif job.output is not None:
        grammar = output_grammar(llm.grammars, job.output)
    else:
        return None
    return grammar.after(THINK_END) if in_reasoning else grammar


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
    """Cuts one answer into reasoning, content and calls."""

    def __init__(self, index: int, answer: Answer, parser: ReplyParser, tokenizer: Tokenizer) -> None:
        self._index = index
        self._answer = answer
        self._parser = parser
        self._tokenizer = tokenizer
        self._reasoning: list[str] = []
        self._calls = 0

    def events(self, piece: Piece) -> Sequence[JobEvent]:
        events = self._parser.push(piece.text)
        if piece.result is not None:
            events = [*events, *self._parser.finish()]
        self._reasoning += [event.text for event in events if isinstance(event, Reasoning)]
        self._calls += sum(isinstance(event, ToolStart) for event in events)
        written: list[JobEvent] = [Choice(self._index, events, piece.logprobs)] if events or piece.logprobs else []
        return written if piece.result is None else [*written, self._finished(piece)]

    def _finished(self, piece: Piece) -> Finished:
        result = piece.result
        assert result is not None
        reasoning = "".join(self._reasoning)
        return Finished(
            index=self._index,
            reason="tool_calls" if self._calls and result.finish_reason == "stop" else result.finish_reason,
            stop=self._answer.text.stop,
            usage=result.usage,
            reasoning_tokens=len(self._tokenizer.encode(reasoning, special=False)) if reasoning else 0,
            timings=result.timings,
        )
