"""From a completion job to its answers: bare prompts, echoed if asked. Knows no wire format but the job's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..results import Piece
from ..stream import Answer
from ..text import Tokenizer
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
        self._service.check_room(len(job.prompts) * job.n)
        answers, writers = await asyncio.to_thread(self._prepare, job)
        return Answers(self._service, self._service.submit(answers), writers, len(answers[0].request.prompt))

    def _prepare(self, job: CompletionJob) -> tuple[list[Answer], list[_CompletionWriter]]:
        llm = self._service.llm
        grammar = output_grammar(llm.grammars, job.output) if job.output else None
        answers: list[Answer] = []
        writers: list[_CompletionWriter] = []
        for prompt in job.prompts:
            prompted = llm.prompted(prompt, raw=True, scope=job.scope)
            for choice in range(job.n):
                answer = llm.answer(
                    prompted,
                    job.params,
                    choice=choice,
                    grammar=grammar,
                    prompt_logprobs=job.params.logprobs if job.echo else None,
                    only_prompt=job.only_prompt,
                    timed=job.timed,
                )
                writers.append(_CompletionWriter(len(answers), answer, llm.tokenizer, echo=job.echo))
                answers.append(answer)
        return answers, writers


class _CompletionWriter:
    def __init__(self, index: int, answer: Answer, tokenizer: Tokenizer, *, echo: bool) -> None:
        self._index = index
        self._answer = answer
        # Spelled out here, on the worker's thread: a prompt may be long.
        self._echo = "".join(answer.prompt_pieces) if echo else None
        self._names = [tokenizer.token_name(id) for id in answer.request.prompt] if echo else []

    def events(self, piece: Piece) -> Sequence[CompletionEvent]:
        written: list[CompletionEvent] = []
        if self._echo is not None:  # with the first piece the prompt is forwarded, and its tokens are scored
            scored = self._answer.request.prompt_logprobs is not None
            written.append(
                Echo(self._index, self._echo, self._names, self._answer.prompt_logprobs() if scored else None)
            )
            self._echo = None
        if piece.text or piece.logprobs:
            content = [Content(piece.text)] if piece.text else []
            written.append(Choice(self._index, content, piece.logprobs, piece.timings))
        if piece.result is not None:
            result = piece.result
            stop = self._answer.text.stop
            written.append(Finished(self._index, result.finish_reason, stop, result.usage, 0, result.timings))
        return written
