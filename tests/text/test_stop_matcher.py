"""Guards: a stop string never shows, nothing before it is lost, nothing is held longer than it must be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfdraft.errors import InvalidRequest
from selfdraft.text import StopMatcher

# Two letters and short stops: overlaps, borders and nested stops come up all the time.
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)
chunk_lists = st.lists(st.text(alphabet="ab", max_size=5), max_size=8)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The slow definition: the stop that ends first; of those ending together, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held_back(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop."""
    lengths = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


@settings(max_examples=1500, deadline=None)
@given(chunks=chunk_lists, stops=stop_lists)
def test_against_the_slow_definition(chunks: list[str], stops: list[str]) -> None:
    matcher, shown, seen, stopped = StopMatcher(stops), "", "", False
    visible, stop = oracle("".join(chunks), stops)
    for chunk in chunks:
        piece, stopped = matcher.push(chunk)
        shown, seen = shown + piece, seen + chunk
        if stopped:
            break
        assert len(seen) - len(shown) == held_back(seen, stops)
    shown += matcher.finish()
    assert (shown, matcher.matched, stopped) == (visible, stop, stop is not None)


@settings(max_examples=1000, deadline=None)
@given(protected=chunk_lists, armed=chunk_lists, stops=stop_lists)
def test_unarmed_text_cannot_complete_a_stop(protected: list[str], armed: list[str], stops: list[str]) -> None:
    start, text = len("".join(protected)), "".join([*protected, *armed])
    visible, stop = text, None
    for end in range(start + 1, len(text) + 1):
        if ending := [entry for entry in stops if text[:end].endswith(entry)]:
            stop = max(ending, key=len)
            visible = text[: end - len(stop)]
            break
    matcher, shown = StopMatcher(stops), ""
    for chunk in protected:
        piece, stopped = matcher.push(chunk, armed=False)
        assert not stopped
        shown += piece
    for chunk in armed:
        shown += matcher.push(chunk)[0]
    assert (shown + matcher.finish(), matcher.matched) == (visible, stop)


def test_stop_in_one_push() -> None:
    assert StopMatcher(["END"]).push("one END two") == ("one ", True)


def test_stop_split_over_pushes() -> None:
    matcher = StopMatcher(["\n\nHuman:"])
    assert matcher.push("hello\n") == ("hello", False)
    assert matcher.push("\nHum") == ("", False)
    assert matcher.push("an: hi") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.finish() == ""
    assert matcher.matched == "\n\nHuman:"


def test_false_alarm_is_released_but_for_what_may_still_begin_a_stop() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa") == ("", False)
    assert matcher.push("a") == ("a", False)  # "aa" may still become "aab"
    assert matcher.push("c") == ("aac", False)


def test_beginning_of_a_stop_at_the_very_end_is_released() -> None:
    matcher = StopMatcher(["###"])
    assert matcher.push("total ##") == ("total ", False)
    assert matcher.finish() == "##"
    assert matcher.finish() == ""


def test_earliest_of_several() -> None:
    assert StopMatcher(["two", "one"]).push("zero one two") == ("zero ", True)
    assert StopMatcher(["one two", "one"]).push("zero one two") == ("zero ", True)


def test_stops_ending_together_hide_the_longer_one() -> None:
    assert StopMatcher(["b", "ab"]).push("xab") == ("x", True)


@pytest.mark.parametrize("chunks", [["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]])
def test_nested_stop_ends_at_the_same_place_however_text_is_cut(chunks: list[str]) -> None:
    """At "abc" the generation ends, and nobody can know whether "d" would have followed."""
    matcher, shown = StopMatcher(["abcd", "bc"]), ""
    for chunk in chunks:
        piece, stopped = matcher.push(chunk)
        shown += piece
        if stopped:
            break
    assert (shown, matcher.matched) == ("a", "bc")


def test_no_stops_holds_nothing() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["ok", ""], [None], [3], "END"])
def test_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop") as caught:
        StopMatcher(stops)
    assert caught.value.param == "stop"
