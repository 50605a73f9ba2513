"""Grammars on llguidance: JSON schemas, Lark grammars and regular expressions as masks over a tokenizer's ids.

Knows a tokenizer and that library; nothing of models, of MLX or of how tokens are drafted. A sentence satisfies the
engine's `Constraint` by its shape alone.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from ..errors import InvalidRequest
from .tokenizer import Tokenizer

__all__ = ["JSON_SPACE", "Grammar", "Grammars", "Sentence", "check_schema"]

MAX_SCHEMA = 256 * 1024  # characters of a JSON schema
MAX_LARK = 64 * 1024
MAX_REGEX = 8 * 1024  # of one regular expression, also inside a schema; longer ones take seconds a token
MAX_NESTING = 64  # of a JSON schema's text
MAX_MESSAGE = 400
CACHED = 64  # grammars kept compiled

# Between the end of reasoning and the sentence models like to put an empty line.
GAP = r"start: GAP @sentence" "\n" r"GAP: /\n{0,2}/"
# JSON may be indented, but not padded for ever: the library's own choice has no bound.
JSON_SPACE = r"[ ]|\n{1,2}[ \t]{0,40}"
# The library recurses along references between rules: at the sizes above it overflows an ordinary stack.
STACK_BYTES = 256 * 1024 * 1024
_stack_size = threading.Lock()
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?| \d+ \| .*")  # in a grammar nobody wrote

# Tighter than the library's own where a hostile grammar could hold up every row that decodes (fuel, a step's time) or
# fill the memory (states); wider where schemas of hundreds of properties need it (items).
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=10_000, step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False
)

Mask = npt.NDArray[np.bool_]


class Sentence(Protocol):
    """What one row may emit (see `selfdraft.engine.constraint.Constraint`)."""

    def allowed(self, drafts: Sequence[int]) -> Mask:
        """What may stand behind each prefix of `drafts`, [len(drafts) + 1, n]."""
        ...

    def emit(self, tokens: Sequence[int]) -> None:
        """Move on."""
        ...


class Grammars:
    """Compiles grammars for one tokenizer, and keeps them. May be used by several threads.

    Attributes:
        vocabulary: the tokenizer's tokens.
        compiled: grammar, parameter to blame -> a matcher at the beginning of a sentence, for rows to copy.

    Raises:
        InvalidRequest: the tokenizer names no end token, without which no sentence could end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocabulary = _Vocabulary(tokenizer)
        self.compiled = lru_cache(maxsize=CACHED)(self._compile)

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema accepts, with its properties in the schema's order.

        Args:
            schema: as an object or as JSON text.

        Raises:
            InvalidRequest: it is no JSON object, is too large or nests too deep, or has a keyword or a value that
                cannot be enforced; the message says which.
        """
        if isinstance(schema, str):
            _check_size("the JSON schema", schema, MAX_SCHEMA, "json_schema")
            schema = _parsed(schema)
        if not isinstance(schema, Mapping):
            raise InvalidRequest(
                f"a JSON schema is an object, not {type(schema).__name__}; wrap it in one", param="json_schema"
            )
        check_schema(schema)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
            _check_size("the JSON schema", text, MAX_SCHEMA, "json_schema")
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": JSON_SPACE})
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the JSON schema is not JSON: {error}", param="json_schema") from error
        return self._grammar(grammar, "json_schema")

    def lark(self, text: str) -> Grammar:
        """A grammar in llguidance's Lark dialect. A special token is written without quotes: <tool_call>.

        Raises:
            InvalidRequest: it is too large, or not a grammar; the message says where.
        """
        _check_size("the grammar", text, MAX_LARK, "grammar")
        return self._grammar(_alone({"lark_grammar": text}), "grammar")

    def calls(self, text: str) -> Grammar:
        """A grammar that `call_grammar` wrote. It may be as large as the schemas in it.

        Raises:
            InvalidRequest: it is too large, or holds what cannot be enforced; the message says what.
        """
        _check_size("the grammar of the tools", text, MAX_SCHEMA, "tools")
        return self._grammar(_alone({"lark_grammar": text}), "tools")

    def regex(self, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole (Rust syntax, no look-around, no back references).

        Raises:
            InvalidRequest: it is too large, or not a regular expression.
        """
        _check_size("the regular expression", pattern, MAX_REGEX, "regex")
        return self._grammar(llguidance.LLMatcher.grammar_from_regex(pattern), "regex")

    def anew(self, grammar: str, param: str) -> llguidance.LLMatcher:
        """`compiled`, of which nothing is shared: rows share a lexer, and one of them may have filled it up."""
        self.compiled.cache_clear()
        return self._compile(grammar, param)

    def _grammar(self, grammar: str, param: str) -> Grammar:
        self.compiled(grammar, param)  # faults are reported here, not when a row starts
        return Grammar(self, grammar, param)

    def _compile(self, grammar: str, param: str) -> llguidance.LLMatcher:
        def job() -> llguidance.LLMatcher:
            matcher = llguidance.LLMatcher(self.vocabulary.library, grammar, log_level=0, limits=LIMITS)
            if not matcher.is_error():
                matcher.compute_bitmask()
            return matcher

        matcher = _on_a_large_stack(job)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split()).removesuffix(" <non-verbose/>")
            if param == "tools":
                reason = _PLACE.sub("", reason)
            raise InvalidRequest(f"{param} cannot be enforced: {reason[:MAX_MESSAGE]}", param=param)
        return matcher


class Grammar:
    """A grammar that compiles: a factory of sentences. Made by `Grammars`."""

    def __init__(self, grammars: Grammars, grammar: str, param: str, marker: str | None = None) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._param = param
        self._marker = marker

    def start(self) -> Sentence:
        """A sentence at its beginning, for one row."""
        vocabulary = self._grammars.vocabulary
        compiled = self._grammars.compiled(self._grammar, self._param)
        sentence = _Matched(vocabulary, compiled, lambda: self._grammars.anew(self._grammar, self._param))
        if self._marker is None:
            return sentence
        return _Later(vocabulary.free_text(self._marker.encode()), vocabulary, sentence)

    def or_else(self, other: Grammar) -> Grammar:
        """A sentence of this grammar or of another one. At most one of them may already be such a choice."""
        first, *more = json.loads(self._grammar)["grammars"]
        second, *others = json.loads(other._grammar)["grammars"]
        named = [{**first, "name": "either"}, *more, {**second, "name": "other"}, *others]
        grammar = json.dumps({"grammars": [{"lark_grammar": "start: @either | @other"}, *named]})
        self._grammars.compiled(grammar, self._param)
        return Grammar(self._grammars, grammar, self._param)

    def after(self, marker: str) -> Grammar:
        """The same grammar behind free text that ends with `marker`, such as "</think>", and at most one empty line.

        The free text cannot hold an end token, and no token reaches beyond the marker.
        """
        if not marker or self._marker:
            raise ValueError("a grammar begins after one marker, and that is not empty")
        inner, *more = json.loads(self._grammar)["grammars"]
        grammar = json.dumps({"grammars": [{"lark_grammar": GAP}, {**inner, "name": "sentence"}, *more]})
        self._grammars.compiled(grammar, self._param)
        return Grammar(self._grammars, grammar, self._param, marker)


class _Vocabulary:
    """A tokenizer as the library sees it, and what the masks need to know of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ends = sorted(id for id in tokenizer.eos_ids if id < tokenizer.vocab_size)
        if not self.ends:
            raise InvalidRequest("a grammar needs an end token to end its sentence, and this checkpoint names none")
        self.library = _library_tokenizer(tokenizer, self.ends)
        self.size: int = self.library.vocab_size
        self.free_text = lru_cache(maxsize=8)(lambda marker: _FreeText(self, marker))

    @cached_property
    def texts(self) -> list[bytes]:
        """What each token adds to an answer."""
        return [self.library.decode_bytes([id]) for id in range(self.size)]

    def masks(self, positions: int) -> Mask:
        """Masks that allow nothing yet."""
        return np.zeros((positions, self.size), dtype=np.bool_)


class _Matched:
    """A sentence of a grammar from its beginning.

    A matcher that met a limit is of no use any more, so a row gets one fresh one; the next time it is at a dead end.
    """

    def __init__(
        self, vocabulary: _Vocabulary, compiled: llguidance.LLMatcher, anew: Callable[[], llguidance.LLMatcher]
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = compiled.deep_copy()
        self._anew: Callable[[], llguidance.LLMatcher] | None = anew
        self._emitted: list[int] = []
        self._first: Mask | None = None  # what may come next: asked for before drafting and after

    def allowed(self, drafts: Sequence[int]) -> Mask:
        masks = self._along(drafts)
        if self._matcher.is_error() and self._anew:
            self._matcher, self._anew = self._anew(), None
            self._matcher.consume_tokens(self._emitted)
            self._first = None
            masks = self._along(drafts)
        return masks

    def emit(self, tokens: Sequence[int]) -> None:
        text = [token for token in tokens if token not in self._vocabulary.ends]
        self._matcher.consume_tokens(text)
        self._emitted += text
        self._first = None

    def _along(self, drafts: Sequence[int]) -> Mask:
        masks = self._vocabulary.masks(len(drafts) + 1)
        if self._first is None:
            self._first = self._next()
        masks[0] = self._first
        taken = 0
        for token in drafts:
            passes = token < self._vocabulary.size and masks[taken, token] and token not in self._vocabulary.ends
            if not passes or not self._matcher.consume_token(token):
                break
            taken += 1
            masks[taken] = self._next()
        if taken:
            self._matcher.rollback(taken)
        return masks

    def _next(self) -> Mask:
        """What may come next; nothing once the matcher met a limit."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask: Mask = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").astype(np.bool_)
        # An end token that is not flagged special would pass as text; the others are what a broken matcher allows.
        mask[self._vocabulary.ends] = self._matcher.is_accepting()
        return mask & (not self._matcher.is_error())


class _FreeText:
    """Text up to a marker. Its state is the tail: as much of its end as may begin the marker."""

    def __init__(self, vocabulary: _Vocabulary, marker: bytes) -> None:
        self._vocabulary = vocabulary
        self._marker = marker
        self._masks: dict[bytes, Mask] = {}

    def allowed(self, tail: bytes) -> Mask:
        """Every token but ends, and those that would reach beyond the marker."""
        mask = self._masks.get(tail)
        if mask is None:
            mask = np.ones(self._vocabulary.size, dtype=np.bool_)
            mask[self._vocabulary.ends] = False
            mask[[id for id, text in enumerate(self._vocabulary.texts) if self._marker in (tail + text)[:-1]]] = False
            self._masks[tail] = mask
        return mask

    def behind(self, tail: bytes, token: int) -> bytes | None:
        """The tail behind one more token; None if it completes the marker."""
        text = tail + self._vocabulary.texts[token]
        if text.endswith(self._marker):
            return None
        longest = min(len(text), len(self._marker) - 1)
        return next((text[-n:] for n in range(longest, 0, -1) if self._marker.startswith(text[-n:])), b"")


class _Later:
    """A sentence that begins behind free text."""

    def __init__(self, free: _FreeText, vocabulary: _Vocabulary, sentence: _Matched) -> None:
        self._free = free
        self._vocabulary = vocabulary
        self._sentence = sentence
        self._tail: bytes | None = b""  # None behind the marker

    def allowed(self, drafts: Sequence[int]) -> Mask:
        masks = self._vocabulary.masks(len(drafts) + 1)
        tail = self._tail
        for position in range(len(masks)):
            if tail is None:
                masks[position:] = self._sentence.allowed(drafts[position:])
                break
            masks[position] = self._free.allowed(tail)
            token = drafts[position] if position < len(drafts) else self._vocabulary.size
            if token >= self._vocabulary.size or not masks[position, token]:
                break
            tail = self._free.behind(tail, token)
        return masks

    def emit(self, tokens: Sequence[int]) -> None:
        for count, token in enumerate(tokens):
            if self._tail is None:
                self._sentence.emit(tokens[count:])
                return
            self._tail = self._free.behind(self._tail, token)


class _Tokens:
    """A tokenizer in the form that the library takes from others.

    The library's own reading of a tokenizer.json spells text that a grammar forces with special tokens where it holds
    their names, and then refuses them, for they are no text: such a grammar would have a dead end.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: Iterable[int], end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos_id
        self.tokens = tokens
        self.special_token_ids = sorted(special)
        self._tokenizer = tokenizer
        self._special = frozenset(special)
        self._ids = {token: id for id, token in enumerate(tokens) if id not in self._special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens that spell a text, as a model would: the library asks where only one text is allowed."""
        text = text.encode() if isinstance(text, str) else text
        try:
            ids = self._tokenizer.encode(text.decode(), special=False)
        except (UnicodeDecodeError, InvalidRequest):
            return self._greedy(text)
        spelled = b"".join(self.tokens[id] for id in ids) == text and self._special.isdisjoint(ids)
        return ids if spelled else self._greedy(text)  # some tokenizers put a space in front

    def _greedy(self, rest: bytes) -> list[int]:
        """The longest token first; what no token spells is left out."""
        ids = []
        while rest:
            lengths = range(min(self._longest, len(rest)), 0, -1)
            length = next((n for n in lengths if rest[:n] in self._ids), 0)
            if length:
                ids.append(self._ids[rest[:length]])
            rest = rest[length or 1 :]
        return ids


def _library_tokenizer(tokenizer: Tokenizer, ends: list[int]) -> llguidance.LLTokenizer:
    try:
        native = llguidance.LLTokenizer(tokenizer.to_json(), eos_token=ends)
        ids = range(native.vocab_size)
        tokens, special = [native.decode_bytes([id]) for id in ids], {id for id in ids if native.is_special_token(id)}
    except ValueError:  # its decoder is neither byte-level nor byte-fallback
        texts = [tokenizer.token_text(id) for id in range(tokenizer.vocab_size)]
        # A token without text, or with part of a character, cannot be spelled out: it is left to no grammar.
        special = {id for id, text in enumerate(texts) if not text or "\ufffd" in text} | tokenizer.special_ids
        tokens = [f"<{id}>".encode() if id in special else text.encode() for id, text in enumerate(texts)]
    wrapper: Any = _Tokens(tokenizer, tokens, special, ends[0])
    return llguidance.LLTokenizer(wrapper, eos_token=ends, slices=llguidance.LLTokenizer.json_slices())


def _alone(grammar: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": [grammar]}, ensure_ascii=False)


def _on_a_large_stack(job: Callable[[], llguidance.LLMatcher]) -> llguidance.LLMatcher:
    """Run a job on a thread of its own, whose stack is only reserved, not filled."""
    results: list[llguidance.LLMatcher] = []
    thread = threading.Thread(target=lambda: results.append(job()), name="grammar")
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return results[0]


def _check_size(what: str, text: str, most: int, param: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{what} must be text, not {type(text).__name__}", param=param)
    if len(text) > most:
        raise InvalidRequest(f"{what} has {len(text)} characters; at most {most} are taken", param=param)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidRequest(f"{what} holds a lone surrogate, which is no Unicode text", param=param)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is not JSON: {error}", param="json_schema") from error


def check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse a schema that nests too deep, or holds a regular expression that is too long.

    Raises:
        InvalidRequest: it does; the message has the figures.
    """
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        below: list[Any] = []
        for node in level:
            if isinstance(node, Mapping):
                named = node.get("patternProperties")
                for pattern in [node.get("pattern"), *(named if isinstance(named, Mapping) else ())]:
                    if isinstance(pattern, str):
                        _check_size("a pattern in the JSON schema", pattern, MAX_REGEX, "json_schema")
                below += node.values()
            elif isinstance(node, list | tuple):
                below += node
        level = below
    if any(isinstance(node, Mapping | list | tuple) for node in level):
        raise InvalidRequest(f"the JSON schema nests deeper than {MAX_NESTING} levels", param="json_schema")
