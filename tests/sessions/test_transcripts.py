"""Ids that were committed are served again where the text is the same, and nowhere else."""

from __future__ import annotations

import pytest

from selfdraft.sessions import Transcripts


def test_the_longest_text_that_begins_it() -> None:
    known = Transcripts()
    known.add("a", "one<end>", [1, 2])
    known.add("a", "one<end>two<end>", [1, 2, 3, 4])
    known.add("a", "one<end>other<end>", [1, 2, 9])
    assert known.longest("a", "one<end>two<end>three") == ("one<end>two<end>", [1, 2, 3, 4])
    assert known.longest("a", "one<end>tw") == ("one<end>", [1, 2])
    assert known.longest("a", "One<end>") is None
    assert known.longest("b", "one<end>two") is None


def test_the_newest_ids_of_a_text_count() -> None:
    known = Transcripts()
    known.add("a", "x<end>", [1])
    known.add("a", "x<end>", [2, 3])
    assert known.longest("a", "x<end>") == ("x<end>", [2, 3])


@pytest.mark.parametrize("used", [False, True])
def test_the_least_recently_used_is_forgotten(used: bool) -> None:
    known = Transcripts(limit=400)
    known.add("a", "a" * 8, [1])
    known.add("a", "b" * 8, [2])
    if used:
        known.longest("a", "a" * 9)
    known.add("a", "c" * 8, [3])
    assert (known.longest("a", "a" * 9) is not None) == used
    assert (known.longest("a", "b" * 9) is None) == used


def test_a_flood_of_one_forgets_its_own() -> None:
    known = Transcripts(limit=1000)
    known.add("quiet", "mine", [1])
    for n in range(50):
        known.add("loud", f"text {n}", [n])
    assert known.longest("quiet", "mine and more") == ("mine", [1])
    assert known.longest("loud", "text 49") == ("text 49", [49])
    assert known.longest("loud", "text 1") is None
