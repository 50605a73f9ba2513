"""Guards: a row's text and its stop token do not depend on how the engine hands the ids over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfdraft.errors import InvalidRequest
from selfdraft.text import RowText, Tokenizer

TEXTS = [
    "The answer is 42.\n\nHuman: next?",
    "नमस्ते 🙂🙂 END the rest 🙂",
    "aaaaabaaab aab",
    "x\r\n\r\ny ### z",
]
STOPS = ["\n\nHuman:", "🙂", "END", "aab", "aaab", "\n\r", "##", "t", " 4", "्ते"]


def run(row: RowText, calls: list[list[int]]) -> tuple[str, str, int | None]:
    """(text by takes, row.text at the end, ids kept when it stopped)."""
    taken, kept = "", 0
    for call in calls:
        stopped = row.push(call)
        taken += row.take()
        if stopped is not None:
            return taken + row.finish(), row.text, kept + stopped
        kept += len(call)
    taken += row.finish()
    return taken, row.text, None


def calls_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    calls, at = [], 0
    for size in [*sizes, len(ids)]:
        calls.append(ids[at : at + size])
        at += size
    return calls


@settings(max_examples=400, deadline=None)
@given(
    text=st.one_of(st.sampled_from(TEXTS), st.text(alphabet="ab\n 🙂é", max_size=20)),
    stops=st.lists(st.sampled_from([*STOPS, "a", "b\n", "é🙂"]), max_size=3),
    sizes=st.lists(st.integers(1, 6), max_size=12),
    minimum=st.integers(0, 8),
)
def test_calls_do_not_matter(tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int], minimum: int) -> None:
    ids = tokenizer.encode(text, special=False)
    one_by_one = run(RowText(tokenizer, stops, minimum), [[id] for id in ids])
    assert run(RowText(tokenizer, stops, minimum), calls_of(ids, sizes)) == one_by_one
    assert run(RowText(tokenizer, stops, minimum), [ids]) == one_by_one


@settings(max_examples=300, deadline=None)
@given(text=st.sampled_from(TEXTS), stops=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
def test_text_and_stop_token(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    """The kept ids decode to text that holds the stop; one id fewer does not."""
    ids = tokenizer.encode(text, special=False)
    taken, whole, kept = run(RowText(tokenizer, stops), [ids])
    assert taken == whole
    if kept is None:
        assert whole == text
        assert not any(stop in text for stop in stops)
    else:
        assert any(stop in tokenizer.decode(ids[:kept]) for stop in stops)
        assert not any(stop in tokenizer.decode(ids[: kept - 1]) for stop in stops)
        assert text.startswith(whole)
        assert not any(stop in whole for stop in stops)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 8200), max_size=30), sizes=st.lists(st.integers(1, 6), max_size=12))
def test_without_stops_it_is_the_whole_decode(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    assert run(RowText(tokenizer), calls_of(ids, sizes)) == (
        tokenizer.decode(ids),
        tokenizer.decode(ids),
        None,
    )


def test_stop_across_token_boundaries(tokenizer: Tokenizer) -> None:
    ids = [id for letter in "xENDy" for id in tokenizer.encode(letter, special=False)]
    assert len(ids) == 5
    row = RowText(tokenizer, ["END"])
    assert row.push(ids[:3]) is None
    assert row.take() == "x"
    assert row.push(ids[3:]) == 1  # the id with "D" completes it and counts; "y" does not
    assert (row.take(), row.finish(), row.text, row.stop) == ("", "", "x", "END")
    assert row.push(ids) == 0


def test_stop_in_the_middle_of_a_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello there", special=False)
    row = RowText(tokenizer, ["her"])
    assert row.push(ids) == len(ids)
    assert row.text == "hello t"


def test_beginning_of_a_stop_at_the_end_is_released(tokenizer: Tokenizer) -> None:
    row = RowText(tokenizer, ["##!"])
    assert row.push(tokenizer.encode("total ##", special=False)) is None
    assert row.text == "total "
    assert row.finish() == "total ##"
    assert (row.text, row.stop, row.finish()) == ("total ##", None, "")


def test_min_tokens_protects_the_first_tokens(tokenizer: Tokenizer) -> None:
    ids = [id for letter in "abcabc" for id in tokenizer.encode(letter, special=False)]
    assert run(RowText(tokenizer, ["b"], 1), [ids]) == ("a", "a", 2)
    assert run(RowText(tokenizer, ["b"], 2), [ids]) == ("abca", "abca", 5)
    assert run(RowText(tokenizer, ["ab"], 1), [ids]) == ("", "", 2)  # begins protected, is completed after
    assert run(RowText(tokenizer, ["b"], 9), [ids]) == ("abcabc", "abcabc", None)


@pytest.mark.parametrize("eos", [8172, 8174])
def test_eos_never_appears(tokenizer: Tokenizer, eos: int) -> None:
    ids = tokenizer.encode("done", special=False)
    assert run(RowText(tokenizer), [[*ids, eos]]) == ("done", "done", None)


def test_eos_that_is_not_flagged_special(tokenizer: Tokenizer) -> None:
    plain = Tokenizer(tokenizer._library, eos_ids=[8191])  # </think>: an added token without the flag
    ids = plain.encode("done</think>", special=True)
    assert ids[-1] == 8191
    assert run(RowText(plain), [ids])[0] == "done" == plain.decode(ids)
    assert plain.decode(ids, skip_special=False) == "done</think>"


def test_stop_found_only_when_the_row_ends(fallback: Tokenizer) -> None:
    """A byte-fallback run is readable only at its end; the stop string is cut all the same."""
    row = RowText(fallback, ["€"])
    assert row.push([257, *"€".encode()]) is None
    assert (row.finish(), row.text, row.stop) == ("a", "a", "€")


@pytest.mark.parametrize(("stops", "minimum", "param"), [([""], 0, "stop"), (["x"], -1, "min_tokens")])
def test_refused(tokenizer: Tokenizer, stops: list[str], minimum: int, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RowText(tokenizer, stops, minimum)
    assert caught.value.param == param


@pytest.mark.parametrize("cut", [False, True])
def test_whoever_ends_a_row_is_told_all_its_text(tokenizer: Tokenizer, cut: bool) -> None:
    """To what was held back at its end: a possible stop string, half a character."""
    told: list[str] = []
    row = RowText(tokenizer, ["ENDING"], ends=lambda text: bool(told.append(text)))
    ids = [*tokenizer.encode("so it END", special=False), *tokenizer.encode("🙂", special=False)[:cut]]
    for id in ids:
        row.push([id])
    assert "".join(told) == row.take() != (text := row.text + row.finish())
    assert "".join(told) == text == "so it END" + "\ufffd" * cut


@pytest.mark.parametrize("min_tokens", [0, 4, 9])
def test_text_that_says_it_is_over_ends_the_row_with_that_token(tokenizer: Tokenizer, min_tokens: int) -> None:
    ids = tokenizer.encode("one two three four five six", special=False)
    told: list[str] = []

    def ends(text: str) -> bool:
        told.append(text)
        return "two" in "".join(told)

    row = RowText(tokenizer, min_tokens=min_tokens, ends=ends)
    said = next(n for n in range(1, len(ids) + 1) if "two" in tokenizer.decode(ids[:n]))
    kept = max(said, min_tokens + 1)
    assert row.push(ids) == (kept if kept <= len(ids) else None)
    if kept <= len(ids):
        assert row.push(ids) == 0
        assert row.finish() == tokenizer.decode(ids[:kept])
    assert row.stop is None
