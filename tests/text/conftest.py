"""The reference checkpoint's tokenizer files, and toy tokenizers with decoders the reference one lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

import selfdraft
from selfdraft.text import ChatTemplate, Tokenizer


@pytest.fixture(scope="session")
def reference() -> Path:
    return Path(selfdraft.__file__).parent / "assets" / "reference"


@pytest.fixture(scope="session")
def tokenizer(reference: Path) -> Tokenizer:
    return Tokenizer.from_folder(reference)


@pytest.fixture(scope="session")
def template(reference: Path) -> ChatTemplate:
    found = ChatTemplate.from_folder(reference)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def fallback() -> Tokenizer:
    """SentencePiece style: spaces as U+2581, bytes as <0x..>, an answer's first space stripped.

    Ids 0..255 are bytes, 256 is special, then ordinary pieces.
    """
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("<s>", "a", "b", "▁a", "▁", "▁▁", "é", "\ufffd", "▁the", "."):
        vocab[piece] = len(vocab)
    library = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    library.add_special_tokens(["<s>"])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(library)


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    vocab = {piece: n for n, piece in enumerate(["[UNK]", "a", "##b", "the", ".", "n't", "é"])}
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    return Tokenizer(library)
