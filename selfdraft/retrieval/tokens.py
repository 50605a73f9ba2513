"""From texts to the tokens that an encoder reads: tokenizer.json as shipped, and the limit of the model's files.

Knows tokenizer files; no weights. Used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointError, ContextOverflow, InvalidRequest
from ..models.folder import read_json

__all__ = ["Texts", "Tokens", "most_tokens"]

_NO_LIMIT = 10**9  # files write a larger number for "none"


@dataclass(frozen=True)
class Tokens:
    """A text as an encoder reads it.

    Attributes:
        ids: of its tokens, those included that the tokenizer adds.
        segments: 0 for a text or the first of a pair, 1 for the second.
    """

    ids: Sequence[int]
    segments: Sequence[int]

    def __len__(self) -> int:
        return len(self.ids)


def most_tokens(folder: Path, positions: int) -> int:
    """Tokens that a text may have: the least of what the model's files say.

    Args:
        positions: that the model has.

    Raises:
        CheckpointError: a file says something that is no limit.
    """
    limits = [positions]
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        path = folder / name
        value = read_json(path).get(key) if path.exists() else None
        if value is None or (isinstance(value, int | float) and value > _NO_LIMIT):
            continue
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{path}: {key} must be a whole number above 0, not {value!r}")
        limits.append(value)
    return min(limits)


class Texts:
    """The tokenizer of a model folder.

    Args:
        most: tokens that a text may have.

    Attributes:
        most: likewise.
        padding: id that rows are filled up with; it is masked.

    Raises:
        CheckpointError: tokenizer.json is missing or cannot be used.
    """

    def __init__(self, folder: Path, most: int) -> None:
        path = folder / "tokenizer.json"
        try:
            source = path.read_text(encoding="utf-8")
            self._library, self._spelling = (tokenizers.Tokenizer.from_str(source) for _ in range(2))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder}: no tokenizer.json there; where only another kind is, transformers writes it: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            ) from error
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} is not a usable tokenizer: {error}; fetch it again") from error
        shipped = self._library.padding or {}
        for library in (self._library, self._spelling):
            library.no_padding()  # a shipped length would fill every text up to it
            library.no_truncation()  # and cut it
        self._spelling.encode_special_tokens = True
        self.most = most
        self._vocabulary: int = self._library.get_vocab_size(with_added_tokens=True)
        self.padding: int = shipped.get("pad_id", _padding(folder, self._library))

    def text(self, text: str, *, truncate: bool, where: str) -> Tokens:
        """A text, with what the tokenizer adds.

        Args:
            truncate: cut its end off where it is too long.
            where: what the caller calls it.

        Raises:
            ContextOverflow: it is too long. InvalidRequest: no Unicode text, or nothing is left of it.
        """
        return self._fitted(self._library, (text,), truncate, where)

    def pair(self, query: str, document: str, *, truncate: bool, where: str) -> Tokens:
        """Two texts in one row; control tokens that they spell are ordinary text.

        Args:
            truncate: cut the end of the document off where both are too long.

        Raises:
            ContextOverflow: too long, and `truncate` is off; or the query leaves no room for a document.
            InvalidRequest: no Unicode text.
        """
        return self._fitted(self._spelling, (query, document), truncate, where)

    def ids(self, ids: Sequence[int], *, truncate: bool, where: str) -> Tokens:
        """Ids as they are: nothing is added.

        Raises:
            ContextOverflow: too many. InvalidRequest: none, or one that the model does not have.
        """
        if outside := [each for each in ids if not 0 <= each < self._vocabulary]:
            raise InvalidRequest(
                f"{where}: the model has no token {outside[0]}, only 0 to {self._vocabulary - 1}: give its own tokens, "
                "or text",
                param=_parameter(where),
            )
        if len(ids) > self.most:
            self._refuse_long(len(ids), truncate, where)
            ids = ids[: self.most]
        return _filled(Tokens(ids, [0] * len(ids)), where)

    def spelled(self, text: str, where: str) -> list[int]:
        """The tokens of a text alone, control tokens that it spells as ordinary text."""
        return list(_encode(self._spelling, (text,), where, added=False).ids)

    def marked(self, text: str) -> list[int]:
        """The tokens of a text of ours alone, with the control tokens in it."""
        return list(_encode(self._library, (text,), "the template", added=False).ids)

    def id_of(self, token: str) -> int:
        """The id of a token.

        Raises:
            CheckpointError: there is none.
        """
        found = self._library.token_to_id(token)
        if found is None:
            raise CheckpointError(f"tokenizer.json has no token {token!r}; this is no model that answers with it")
        return int(found)

    def _fitted(self, library: tokenizers.Tokenizer, texts: tuple[str, ...], truncate: bool, where: str) -> Tokens:
        encoding = _encode(library, texts, where)
        if len(encoding.ids) > self.most:
            self._refuse_long(len(encoding.ids), truncate, where)
            library.enable_truncation(self.most, strategy="only_second" if len(texts) > 1 else "longest_first")
            try:
                encoding = _encode(library, texts, where)
            except Exception as error:  # the library's own: what may be cut is too short
                raise ContextOverflow(
                    f"{where}: the query alone fills the {self.most} tokens that this model reads; shorten it",
                    param="query",
                ) from error
            finally:
                library.no_truncation()
        return _filled(Tokens(encoding.ids, encoding.type_ids), where)

    def _refuse_long(self, length: int, truncate: bool, where: str) -> None:
        if not truncate:
            raise ContextOverflow(
                f"{where} has {length} tokens, and this model reads {self.most}: split it, or send truncate: true to "
                "have its end cut off",
                param=_parameter(where),
            )


def _encode(library: tokenizers.Tokenizer, texts: tuple[str, ...], where: str, *, added: bool = True) -> Any:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{where} is not valid Unicode: lone surrogate {text[error.start]!r} at character {error.start}",
                param=_parameter(where),
            ) from error
    return library.encode(texts[0], texts[1] if len(texts) > 1 else None, add_special_tokens=added)


def _filled(tokens: Tokens, where: str) -> Tokens:
    if not tokens:
        raise InvalidRequest(f"{where} is empty: this model has nothing to read", param=_parameter(where))
    return tokens


def _parameter(where: str) -> str:
    return where.split("[")[0]


def _padding(folder: Path, library: tokenizers.Tokenizer) -> int:
    """The id in config.json, else 0: what stands in a masked place is not read."""
    value = read_json(folder / "config.json").get("pad_token_id")
    return value if type(value) is int and 0 <= value < library.get_vocab_size() else 0
