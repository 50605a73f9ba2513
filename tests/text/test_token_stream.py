"""Guards: streamed pieces, joined, equal one decode of all ids, and no piece shows half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfdraft.text import Tokenizer

SAMPLES = [
    "plain text, with 'quotes' and\n\n  spaces",
    "👩‍👩‍👧‍👦 family, 🇮🇳 flag, 👍🏽 thumb, 🙂🙂🙂",
    "नमस्ते दुनिया, क्षत्रिय",
    "日本語のテキスト、한국어, العربية",
    "e\u0301 é \u00a0\u200b\ufeff \ufffd end",
    "<think>\nhm\n</think>\n\n<tool_call>",
]

# Byte-level ids below 256 are single bytes in the reference vocabulary: they make broken UTF-8 likely.
reference_ids = st.lists(st.one_of(st.integers(0, 8191), st.integers(0, 255), st.integers(8170, 8300)), max_size=40)
fallback_ids = st.lists(st.one_of(st.integers(0, 265), st.integers(256, 265), st.integers(128, 255)), max_size=30)
cuts = st.lists(st.integers(1, 5), max_size=40)


def streamed(tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Pieces of pushes of the given sizes (one by one after them), and of the final flush."""
    stream, pieces, at = tokenizer.stream(), [], 0
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(stream.push(ids[at : at + size]))
        at += size
    return [*pieces, stream.finish()]


@settings(max_examples=400, deadline=None)
@given(ids=reference_ids, sizes=cuts)
def test_byte_level_equals_whole_decode(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    assert "".join(streamed(tokenizer, ids, sizes)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=24), sizes=cuts)
def test_broken_utf8_equals_whole_decode(tokenizer: Tokenizer, data: bytes, sizes: list[int]) -> None:
    """Raw bytes as tokens: the library's lossy reading and ours must agree on every malformed sequence."""
    ids = [byte_id(tokenizer, byte) for byte in data]
    text = tokenizer.decode(ids)
    assert text == data.decode("utf-8", "replace")
    assert "".join(streamed(tokenizer, ids, sizes)) == text


@settings(max_examples=400, deadline=None)
@given(ids=fallback_ids, sizes=cuts)
def test_byte_fallback_equals_whole_decode(fallback: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    assert "".join(streamed(fallback, ids, sizes)) == fallback.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=12), sizes=cuts)
def test_byte_fallback_of_any_text(fallback: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = [257, *text.encode("utf-8"), 258]
    assert "".join(streamed(fallback, ids, sizes)) == f"a{text}b"


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 8), max_size=20), sizes=cuts)
def test_wordpiece_equals_whole_decode(wordpiece: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    assert "".join(streamed(wordpiece, ids, sizes)) == wordpiece.decode(ids)


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(max_size=30), st.sampled_from(SAMPLES)))
def test_valid_text_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    """One id a push: every prefix shown is a prefix of the text (so no U+FFFD the text does not have)."""
    ids = tokenizer.encode(text, special=False)
    whole, shown = tokenizer.decode(ids), ""
    stream = tokenizer.stream()
    for id in ids:
        shown += stream.push([id])
        assert whole.startswith(shown)
    assert shown == whole
    assert stream.finish() == ""


def test_emoji_byte_by_byte(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    ids = [byte_id(tokenizer, byte) for byte in "🙂é".encode()]
    assert [stream.push([id]) for id in ids] == ["", "", "", "🙂", "", "é"]


def test_incomplete_tail_is_flushed_as_a_replacement_character(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    assert stream.push([byte_id(tokenizer, byte) for byte in "a🙂".encode()[:3]]) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_byte_fallback_run_is_held_until_it_ends(fallback: Tokenizer) -> None:
    """The library turns a whole run into U+FFFD for one bad byte; what was shown cannot be taken back."""
    stream = fallback.stream()
    euro = [*"€".encode()]
    assert [stream.push([id]) for id in [*euro, 257]] == ["", "", "", "€a"]
    stream = fallback.stream()
    assert [stream.push([id]) for id in [*euro, 0xFF, 258]] == ["", "", "", "", "\ufffd" * 4 + "b"]


def test_byte_fallback_complete_at_the_end(fallback: Tokenizer) -> None:
    stream = fallback.stream()
    assert stream.push([*"€".encode()]) == ""
    assert stream.finish() == "€"


@pytest.mark.parametrize("ids", [[], [8172, 8173, 8174], [9000, 100_000]])
def test_special_and_unknown_ids_have_no_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(streamed(tokenizer, ids, [])) == "" == tokenizer.decode(ids)


def test_special_id_inside_a_character(tokenizer: Tokenizer) -> None:
    first, *rest = [byte_id(tokenizer, byte) for byte in "é".encode()]
    stream = tokenizer.stream()
    assert stream.push([first, 8174]) == ""
    assert stream.push(rest) == "é" == tokenizer.decode([first, 8174, *rest])


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """Id of the token that is exactly this byte (GPT-2's byte alphabet)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in visible]
    id = tokenizer.token_id(chr(byte) if byte in visible else chr(256 + others.index(byte)))
    assert id is not None
    return id
