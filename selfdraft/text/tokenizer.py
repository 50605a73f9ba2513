"""A checkpoint's tokenizer: text to ids and back. Knows tokenizer files; nothing of templates or models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import CheckpointError, InvalidRequest
from ._files import read_json, read_text, token_content
from .stream import TokenStream, bytes_of

__all__ = ["Tokenizer"]


class Tokenizer:
    """tokenizer.json, taken as shipped, on the `tokenizers` library; truncation and padding are turned off.

    Attributes:
        vocab_size: number of tokens, added tokens included. A model's logits may be wider (padded).
        eos_ids: ids that end an answer. Never decoded, flagged special or not.
        bos_id: the id a raw prompt must begin with, or None. `encode` never adds it: a rendered template
            already writes it where it belongs, so only a caller that encodes a bare prompt prepends it.
        special_ids: ids `decode` skips: the tokens flagged special, and eos_ids.
        added: text and id of the tokens that are cut out of a text before all else, and of nothing around them: what
            stands on either side of one is tokenised by itself.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, *, eos_ids: Iterable[int] = (), bos_id: int | None = None
    ) -> None:
        library.no_truncation()  # a shipped limit would cut prompts silently
        library.no_padding()
        self._library = library
        self.vocab_size: int = library.get_vocab_size(with_added_tokens=True)
        self.eos_ids: frozenset[int] = frozenset(eos_ids)
        self.bos_id = bos_id
        added = library.get_added_tokens_decoder()
        self._flagged: frozenset[int] = frozenset(int(id) for id, token in added.items() if token.special)
        self.special_ids: frozenset[int] = self._flagged | self.eos_ids
        self.added: dict[str, int] = {
            token.content: int(id)
            for id, token in added.items()
            if not (token.lstrip or token.rstrip or token.single_word)
        }
        self._anchor: int | None = library.token_to_id("a")
        self._texts: dict[int, str] = {}  # of `token_text`, at most the vocabulary
        self._partial: dict[int, bytes] = {}  # of `token_bytes`, where the text does not tell

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and, for the EOS and BOS ids, the configs beside it.

        EOS comes from the first of these that names one: generation_config.json, config.json (top level, then
        text_config), tokenizer_config.json's eos_token. BOS is tokenizer_config.json's bos_token if
        add_bos_token is true or, where that key is absent, if the tokenizer's own post-processor puts it
        first.

        Raises:
            CheckpointError: tokenizer.json is missing or unusable, a config is malformed, or a config names a
                token the tokenizer lacks.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        source = read_text(path)
        if source is None:
            raise CheckpointError(
                f"no tokenizer.json in {folder}. Download the checkpoint again with all its files; if it "
                "ships only a tokenizer.model, convert it with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        try:
            library = tokenizers.Tokenizer.from_str(source)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} is not a usable tokenizer: {error}. Download it again.") from error
        config = read_json(folder / "tokenizer_config.json")
        return cls(library, eos_ids=_eos_ids(folder, config, library), bos_id=_bos_id(folder, config, library))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; nothing is added at either end.

        special=True recognises every added token written in the text, as a rendered template needs.

        special=False is for text that must not inject one: every added token is spelled out as ordinary text,
        the flagged ones and also the unflagged markers such as <think> or <tool_call>. Only added tokens of
        pure white space (GPT-NeoX has them) stay: they are text.

        Raises:
            InvalidRequest: a lone surrogate, which is no Unicode text; or, with special=False, text that a
                tokenizer turns into a control token all the same (a Unigram model may).
        """
        library = self._library if special else self._plain
        try:
            ids: list[int] = library.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            if isinstance(text, str):
                raise InvalidRequest(f"the text is not valid Unicode: {_surrogate(text)}") from error
            raise
        if not special and not self._flagged.isdisjoint(ids):
            found = next(id for id in ids if id in self._flagged)
            raise InvalidRequest(f"the text spells control token {self._library.id_to_token(found)!r}")
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`. skip_special leaves out `special_ids`. Ids outside the vocabulary have no text."""
        kept = [int(id) for id in ids if not (skip_special and id in self.special_ids)]
        text: str = self._library.decode(kept, skip_special_tokens=False)
        return text

    def token_text(self, id: int) -> str:
        """The text one token adds in the middle of an answer. Special tokens show, part of a character gives U+FFFD,
        an id outside the vocabulary nothing."""
        text = self._texts.get(id)
        if text is None:
            text = self._texts[id] = self._token_text(id)
        return text

    def token_bytes(self, id: int) -> bytes:
        """What is behind `token_text`: of part of a character, the bytes it is."""
        text = self.token_text(id)
        if "\ufffd" not in text:
            return text.encode()
        raw = self._partial.get(id)
        if raw is None:
            raw = self._partial[id] = bytes_of(self._library.id_to_token(id) or "", self._library.decoder)
        return raw

    def token_name(self, id: int) -> str:
        """The text of a token, for logprobs; part of a character as OpenAI writes it: bytes:\\xe2\\x80."""
        raw = self.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each id completes; joined, the text of all with special tokens shown."""
        stream = TokenStream(self._library)
        pieces = [stream.push((id,)) for id in ids]
        return [*pieces[:-1], pieces[-1] + stream.finish()] if pieces else []

    def _token_text(self, id: int) -> str:
        alone = self.decode([id], skip_special=False)
        if self._anchor is None:
            return alone
        # Behind another token, so that decoders which strip an answer's first space keep this one's.
        before = self.decode([self._anchor], skip_special=False)
        both = self.decode([self._anchor, id], skip_special=False)
        return both[len(before) :] if both.startswith(before) else alone

    def token_id(self, token: str) -> int | None:
        """Id of the token spelled exactly so in the vocabulary ("<think>"), or None."""
        return self._library.token_to_id(token)

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json, for libraries that read one."""
        text: str = self._library.to_str()
        return text

    def stream(self, keep: frozenset[str] = frozenset()) -> TokenStream:
        """A fresh incremental decoder; its pieces add up to `decode` of all the ids it was given.

        Tokens spelled exactly as a string in `keep` are written out even if they are special; EOS ids never are.
        """
        kept = {id for token in keep if (id := self.token_id(token)) is not None} - self.eos_ids
        return TokenStream(self._library, skip=self.special_ids - kept)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A copy that does not recognise added tokens in text."""
        library = self._library
        plain = tokenizers.Tokenizer(library.model)  # shared, not copied: vocabulary and merges are large
        plain.normalizer, plain.pre_tokenizer = library.normalizer, library.pre_tokenizer
        added = sorted(library.get_added_tokens_decoder().items())  # in this order each gets the id it has
        for marker, run in groupby((token for _, token in added), key=lambda token: bool(token.content.strip())):
            # encode_special_tokens spells out flagged tokens only, so the unflagged markers are flagged here.
            (plain.add_special_tokens if marker else plain.add_tokens)(list(run))
        plain.encode_special_tokens = True
        return plain


def _eos_ids(folder: Path, tokenizer_config: dict[str, Any], library: tokenizers.Tokenizer) -> frozenset[int]:
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    sources = [
        ("generation_config.json", read_json(folder / "generation_config.json")),
        ("config.json", config),
        ("config.json's text_config", text_config if isinstance(text_config, dict) else {}),
    ]
    for name, source in sources:
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is None or not ids:
            continue
        if not all(type(id) is int and id >= 0 for id in ids):
            raise CheckpointError(f"{folder}: eos_token_id in {name} must be an id or a list of them, not {value!r}.")
        return frozenset(ids)
    token = token_content(tokenizer_config.get("eos_token"))
    return frozenset() if token is None else frozenset([_id_of(token, "eos_token", folder, library)])


def _bos_id(folder: Path, tokenizer_config: dict[str, Any], library: tokenizers.Tokenizer) -> int | None:
    token = token_content(tokenizer_config.get("bos_token"))
    add = tokenizer_config.get("add_bos_token")
    if add is None and token is not None:
        return next((id for id in library.encode("").ids[:1] if id == library.token_to_id(token)), None)
    if not add:
        return None
    if token is None:
        raise CheckpointError(f"{folder}: tokenizer_config.json says add_bos_token but names no bos_token.")
    return _id_of(token, "bos_token", folder, library)


def _id_of(token: str, key: str, folder: Path, library: tokenizers.Tokenizer) -> int:
    id = library.token_to_id(token)
    if id is None:
        raise CheckpointError(f"{folder}: {key} {token!r} of tokenizer_config.json is not in tokenizer.json.")
    return id


def _surrogate(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"lone surrogate {text[error.start]!r} at character {error.start}"
    return "the tokenizer refused it"
