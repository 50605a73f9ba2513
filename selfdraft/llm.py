"""The facade: a loaded model that takes prompts and gives text. Puts text and engine together; decides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from . import tuned
from .budget import MemoryBudget, Need, together
from .device import active_blas
from .engine import ProfiledCycle, Request
from .errors import InvalidRequest
from .kernels.self_check import used_kernels
from .memory import Holdings, release_buffers
from .models.base import Model
from .opening import Parts, open_parts, sampling_defaults
from .params import SamplingParams
from .prompts import LOCAL, Prompted, Prompts
from .results import Generation, TokenLogprob
from .sessions import PromptSession, SessionBank, Transcripts
from .settings import Settings
from .stream import Answer, TextStream
from .text import RowText

if TYPE_CHECKING:
    from .distributed.leading import Leader
    from .fans.max_mode import MaxMode
    from .text.grammar import Grammar, Grammars
    from .text.thinking import ThinkingBudget

__all__ = ["LLM", "Prompt"]

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | Prompted
Progress = Callable[[int, int], None]

_SESSION_SHARE = 0.25  # of the memory that the weights leave


class LLM:
    """A model in memory. Use `selfdraft.load` to make one.

    One thread at a time. Streams may be interleaved: all rows advance together, whichever is read.

    Attributes:
        name: what it was loaded as.
        checkpoint: what its folder holds.
        adapter: what its trunk was changed by; None for nothing.
        defaults: sampling defaults of its generation_config.json.
        settings: how it was opened.
        budget: what rows and warm prefixes may use of the memory.
        prompts: renders and tokenises.
        sessions: warm prefixes; None if none are kept.
        max_mode: what holds the fans while rows run; None in other modes.
        notes: lines a user should read, such as why it decodes without a head.
        tower: what reads images; None if nothing does.
        weights_bytes: of all weights in memory.
        max_depth: deepest draft; 0 means plain decoding only.
        context_length: most tokens of prompt and answer together.
    """

    def __init__(self, parts: Parts) -> None:
        checkpoint, loaded, engine = parts.checkpoint, parts.loaded, parts.engine
        settings, granted, vision = parts.settings, parts.granted, parts.vision
        self.name = parts.name
        self.checkpoint = checkpoint
        self.adapter = parts.adapter
        self.loaded = loaded
        self.tokenizer = parts.tokenizer
        self.template = parts.template
        self.engine = engine
        self.settings = settings
        self.tower = vision.load(checkpoint, loaded.dtype)
        self.weights_bytes = loaded.nbytes + (self.tower.nbytes if self.tower else 0)
        self.budget = MemoryBudget(engine, replace(granted, weights=self.weights_bytes), parts.beside)
        asked = settings.session_cache_max_bytes
        left = granted.total - granted.beside - granted.weights
        limit = int(_SESSION_SHARE * left) if asked is None else int(asked)
        self.sessions = SessionBank(loaded.model.new_state, limit, payload=parts.payload) if limit else None
        self._stride = _stride(loaded.model, engine.prefill_chunk)
        self._vision = vision
        pictures = vision.prompts(self.tower, loaded.model.vocab_size)
        self.prompts = Prompts(parts.tokenizer, parts.template, Transcripts() if self.sessions else None, pictures)
        self.max_mode: MaxMode | None = None
        self.notes = parts.notes
        self.defaults = sampling_defaults(checkpoint)
        self.max_depth = loaded.model.max_depth
        self.context_length = loaded.model.context_length

    @classmethod
    def open(
        cls,
        name: str,
        folder: Path,
        settings: Settings,
        *,
        profile: bool = False,
        progress: Progress | None = None,
        leader: Leader | None = None,
        beside: Callable[[], Holdings] = Holdings,
    ) -> LLM:
        """Load the model in a folder, with the adapter of the settings; see `selfdraft.load`, which finds it by name.

        Args:
            leader: of a group whose ranks share the model; this is rank 0 of it.

        Raises:
            OutOfMemoryBudget: its weights do not fit; none was read.
        """
        llm = cls(open_parts(name, folder, settings, profile=profile, progress=progress, leader=leader, beside=beside))
        if llm.max_depth and not leader:  # what one process measured says nothing of several
            llm.engine.start_from(tuned.find(tuned.belongs_to(folder, llm.describe())))
        return llm

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        enable_thinking: bool = False,
        on_prefill: Progress | None = None,
    ) -> Generation:
        """Answer a prompt.

        Args:
            prompt: a string is one user message; a list of dicts a conversation; a list of ints raw tokens; what
                `prompted` made is taken as it is.
            params: what is asked for; fields at None take the checkpoint's defaults.
            raw: take a string as it is, without the chat template.
            enable_thinking: let a template that knows thinking open with it.
            on_prefill: called with (prompt tokens forwarded, prompt tokens), several times a prefill chunk.

        Raises:
            InvalidRequest: a bad parameter, an empty prompt, a depth the head does not allow.
            ContextOverflow: the prompt does not fit.
            OutOfMemoryBudget: the memory for it is not there, by what is known beforehand.
            NonFiniteLogits: the model broke down.
        """
        result = None
        for piece in self.stream(prompt, params, raw=raw, enable_thinking=enable_thinking, on_prefill=on_prefill):
            result = piece.result
        assert result is not None
        return result

    def generate_many(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, *, raw: bool = False
    ) -> list[Generation]:
        """Answer several prompts side by side, each a row of the same batch.

        Raises:
            OutOfMemoryBudget: together they need more than there is. And what `generate` raises.
        """
        answers = [self.answer(self.prompted(prompt, raw=raw), params) for prompt in prompts]
        streams = self._begun(answers)
        results: list[Generation | None] = [None] * len(streams)
        running = dict(enumerate(streams))
        while running:
            for index, stream in list(running.items()):
                piece = next(stream, None)
                if piece is None:  # asked once more behind its last piece, a stream leaves what it knows
                    del running[index]
                elif piece.result is not None:
                    results[index] = piece.result
        return [result for result in results if result is not None]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        enable_thinking: bool = False,
        on_prefill: Progress | None = None,
    ) -> TextStream:
        """Answer a prompt piece by piece; see `generate`. The last piece carries the finished generation.

        Bad input is refused here, before the first piece is asked for.
        """
        prompted = self.prompted(prompt, raw=raw, enable_thinking=enable_thinking)
        (stream,) = self._begun([self.answer(prompted, params, on_prefill=on_prefill)])
        return stream

    def score(self, prompt: Prompt, *, top: int = 0, raw: bool = False) -> list[TokenLogprob | None]:
        """How likely a prompt is: the log-probability of each of its tokens after those before it.

        Args:
            prompt, raw: see `generate`.
            top: how many of the most likely tokens to tell beside each.

        Returns:
            One entry a token; None for the first, nothing comes before it.

        Raises:
            InvalidRequest, ContextOverflow, OutOfMemoryBudget, NonFiniteLogits: as `generate` does.
        """
        answer = self.answer(self.prompted(prompt, raw=raw), prompt_logprobs=top, only_prompt=True)
        (stream,) = self._begun([answer])
        for _ in stream:
            pass
        return answer.prompt_logprobs()

    def answer(
        self,
        prompt: Prompted | Sequence[int],
        params: SamplingParams | None = None,
        *,
        choice: int = 0,
        keep: frozenset[str] = frozenset(),
        grammar: Grammar | ThinkingBudget | None = None,
        ends: Callable[[str], bool] | None = None,
        on_prefill: Progress | None = None,
        prompt_logprobs: int | None = None,
        only_prompt: bool = False,
        timed: bool = False,
    ) -> Answer:
        """An answer to a prompt, for someone else to step; see `stream`.

        Args:
            choice: which of several answers to the same prompt it is: seeded ones differ by it.
            keep: special tokens that are part of the text.
            grammar: what the answer must be; see `grammars`.
            ends: says by its text where the answer ends; see `RowText`.
            prompt_logprobs, only_prompt: see `Request`.
            timed: see `Answer`.
        """
        prompted = prompt if isinstance(prompt, Prompted) else Prompted(prompt, stops=(len(prompt) - 1,))
        params = (params or SamplingParams()).resolved(self.defaults)
        text = RowText(self.tokenizer, params.stop, params.min_tokens, keep=keep, ends=ends)
        request = Request(
            prompt=prompted.tokens,
            params=params,
            stop_ids=self.tokenizer.eos_ids,
            choice=choice,
            text_stop=text.push,
            constraint=grammar.start() if grammar else None,
            on_prefill=on_prefill,
            prompt_logprobs=prompt_logprobs,
            only_prompt=only_prompt,
            inputs=prompted.inputs,
        )
        self.engine.check(request)
        if params.cache_prompt and not only_prompt and prompt_logprobs is None:
            request = replace(request, session=self._session(prompted))
        return Answer(self.engine, self.tokenizer, request, text, timed=timed)

    def _begun(self, answers: Sequence[Answer]) -> list[TextStream]:
        """Streams of answers whose memory is there, beside what runs; warm prefixes give way to them.

        Raises:
            OutOfMemoryBudget: it is not.
        """
        running = [self.budget.need(row.request) for row in self.engine.rows]
        fitted = [self.budget.fitted(answer.request, spare=self.session_bytes) for answer in answers]
        for answer, (request, _) in zip(answers, fitted, strict=True):
            answer.request = request
        needs = [need for _, need in fitted]
        self.budget.check_together([*running, *needs])
        self.make_room([*running, *needs], lacking=self.budget.lacking(together(needs)))
        return [TextStream(answer) for answer in answers]

    @property
    def vision(self) -> bool:
        """Whether it reads images."""
        return self.tower is not None

    @property
    def blind(self) -> str:
        """Why it reads no images; empty if it does."""
        return self._vision.reason

    @property
    def session_bytes(self) -> int:
        """Bytes of warm prefixes, which give way to rows."""
        return self.sessions.figures.bytes if self.sessions else 0

    def make_room(self, needs: Sequence[Need], *, lacking: int = 0) -> None:
        """Have warm prefixes hold no more than rows leave of the memory, and give up what is lacking for them.

        Args:
            needs: of all rows.
            lacking: bytes that are not free.
        """
        if self.sessions is None:
            return
        self.sessions.allow(min(self.budget.prefix_room(together(needs)), self.sessions.limit))
        if lacking:
            self.sessions.shrink(max(0, self.session_bytes - lacking))

    def release(self) -> int:
        """Give back what MLX keeps of memory that no array uses: for when nothing runs for a while.

        Returns:
            Bytes that this set free.
        """
        return release_buffers()

    def _session(self, prompted: Prompted) -> PromptSession | None:
        if self.sessions is None:
            return None
        stops = [*prompted.stops, *range(self._stride, len(prompted.tokens), self._stride)]

        def remember(tokens: Sequence[int]) -> None:
            self.prompts.remember(prompted, tokens)

        if prompted.inputs is not None:
            stops = [stop for stop in stops if prompted.inputs.outside(stop)]
        return PromptSession(self.sessions, prompted.scope, prompted.keys, stops, on_reply=remember)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles what an answer can be held to: JSON schemas, Lark grammars, regular expressions.

        Raises:
            InvalidRequest: this checkpoint names no end token.
        """
        from .text.grammar import Grammars  # its library is for those who ask for it

        return Grammars(self.tokenizer)

    def tokens(self, prompt: Prompt, *, raw: bool = False, enable_thinking: bool = False) -> list[int]:
        """The ids a prompt is decoded from; see `prompted`."""
        return list(self.prompted(prompt, raw=raw, enable_thinking=enable_thinking).tokens)

    def prompted(
        self, prompt: Prompt, *, raw: bool = False, enable_thinking: bool = False, scope: str = LOCAL
    ) -> Prompted:
        """A prompt as tokens, and where the next one may want to go on from.

        Raises:
            InvalidRequest: a prompt of no known kind, an invalid conversation, no chat template to render it with.
        """
        if isinstance(prompt, Prompted):
            return prompt
        if isinstance(prompt, bytes | bytearray | memoryview):
            raise InvalidRequest(
                "a prompt of bytes is ambiguous: decode it to a string, or give a list of ids", param="prompt"
            )
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest("the prompt is empty; write something", param="prompt")
            if raw:
                return self.prompts.raw(prompt, scope=scope)
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, Sequence) and not prompt:
            raise InvalidRequest("the prompt is empty: give a message or a token id", param="prompt")
        if not isinstance(prompt, Sequence):
            raise InvalidRequest(
                f"a prompt is a string, a list of messages or a list of token ids, not {prompt!r}", param="prompt"
            )
        if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            tokens = [token for token in prompt if isinstance(token, int)]
            return Prompted(tokens, stops=(len(tokens) - 1,), scope=scope)
        messages = [message for message in prompt if isinstance(message, Mapping)]
        if len(messages) != len(prompt):
            raise InvalidRequest("a prompt is either all messages (dicts) or all token ids (ints)", param="prompt")
        return self.prompts.chat(messages, enable_thinking=enable_thinking, scope=scope)

    def hold_fans(self, max_mode: MaxMode) -> None:
        """Have the fans at maximum while rows run: the engine's mode must be sustained."""
        self.max_mode = max_mode
        self.engine.on_rows = max_mode.set_busy

    @property
    def mode(self) -> str:
        """The engine's mode; "max" where fans are held, too."""
        return "max" if self.max_mode is not None else self.engine.mode

    def limit_context(self, tokens: int) -> None:
        """Take no more than `tokens` tokens of prompt and answer together, if the model could take more."""
        self.context_length = self.loaded.model.context_length = min(tokens, self.context_length)

    def limit_depth(self, depth: int) -> None:
        """Draft no more than `depth` tokens a cycle, if the model could draft more; 0 is plain decoding for all."""
        self.max_depth = self.loaded.model.max_depth = min(depth, self.max_depth)

    def describe(self) -> dict[str, Any]:
        """What runs: device, dtype, BLAS, kernels of our own, adapter, depth limit, mode."""
        return {
            "device": "cpu" if mx.default_device() == mx.cpu else "gpu",
            "blas": active_blas(),
            "dtype": str(self.loaded.dtype).removeprefix("mlx.core."),
            "quantisation": self.loaded.quantisation,
            "weights_bytes": self.weights_bytes,
            "vision": self._vision.described,
            "kernels": used_kernels(),
            "adapter": self.adapter.describe() if self.adapter else None,
            "max_depth": self.max_depth,
            "context_length": self.context_length,
            "mode": self.mode,
            "notes": list(self.notes),
        }

    def profile_report(self) -> str | None:
        """Where the time of all cycles so far went; None unless loaded with profile=True."""
        cycle = self.engine.cycle
        return cycle.report() if isinstance(cycle, ProfiledCycle) else None


def _stride(model: Model, chunk: int) -> int:
    """Tokens of a long prompt between boundaries that no message asks for: states that do not grow with the prompt are
    then at most a quarter of what does."""
    fixed = model.new_state().shape.moment_bytes
    many = 4096 * chunk  # a few tokens more may not need a byte more: buffers grow by whole blocks
    per_token = (model.row_bytes(2 * many) - model.row_bytes(many)) / many
    return max(1, math.ceil(4 * fixed / per_token / chunk)) * chunk
