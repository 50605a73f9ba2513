"""From a completion job to its answers: bare prompts, echoed if asked. Knows no wire format but the job's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..errors import InvalidRequest
from ..results import Piece
from ..stream import Answer
from ..text.reply.events import Content
from .chat import output_grammar
from .dialects.openai_completions import CompletionEvent, CompletionJob, Echo
from .jobs import Choice, Finished
from .running import Answers
from .service import EngineService

__all__ = ["Completions"]


class Completions:
    """Answers completion jobs with the model of a service."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def start(self, job: CompletionJob) -> Answers:
        """Check a job and queue its answers.

        Raises:
            SelfdraftError: it is refused.
        """
        answers, writers = await asyncio.to_thread(self._prepare, job)
        return Answers(self._service, self._service.submit(answers), writers, len(answers[0].request.prompt))

    def _prepare(self, job: CompletionJob) -> tuple[list[Answer], list[_CompletionWriter]]:
        if job.echo and job.params.logprobs is not None:
            raise InvalidRequest("echo with logprobs is not possible yet: ask for one of them", param="logprobs")
        llm = self._service.llm
        grammar = output_grammar(llm.grammars, job.output) if job.output else None
        answers: list[Answer] = []
        writers: list[_CompletionWriter] = []
        for prompt in job.prompts:
            tokens = llm.tokens(prompt, raw=True)
            for choice in range(job.n):
                answer = llm.answer(tokens, job.params, choice=choice, grammar=grammar)
                writers.append(_CompletionWriter(len(answers), answer, echo=job.echo))
                answers.append(answer)
        return answers, writers


class _CompletionWriter:
    def __init__(self, index: int, answer: Answer, *, echo: bool) -> None:
        self._index = index
        self._answer = answer
        self._echo = echo

    def events(self, piece: Piece) -> Sequence[CompletionEvent]:
        written: list[CompletionEvent] = []
        if self._echo:
            self._echo = False
            written.append(self._echoed())
        if piece.text or piece.logprobs:
            written.append(Choice(self._index, [Content(piece.text)] if piece.text else [], piece.logprobs))
        if piece.result is not None:
            result = piece.result
            stop = self._answer.text.stop
            written.append(Finished(self._index, result.finish_reason, stop, result.usage, 0, result.timings))
        return written

    def _echoed(self) -> Echo:
        text, names = self._answer.prompt_text()
        return Echo(self._index, text, names, None)
