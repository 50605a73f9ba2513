"""An answer on a terminal: words are wrapped however its pieces are cut, and no control code gets through."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfdraft.cli.answer import AnswerText, Wrap
from selfdraft.cli.figures import Tally
from selfdraft.results import Timings

TAKEN_BACK = re.compile(r"\x1b\[(\d+)D\x1b\[K\n")


def screen(written: str) -> list[str]:
    """Lines as a terminal would show them, of text with corrections."""
    text = ""
    for part in re.split(r"(\x1b\[\d+D\x1b\[K\n)", written):
        if found := TAKEN_BACK.fullmatch(part):
            text = text[: -int(found[1])] + "\n"
        else:
            text += part
    return text.split("\n")


def wrapped(pieces: list[str], width: int) -> list[str]:
    wrap = Wrap(width)
    return screen("".join(map(wrap.push, pieces)))


def test_a_word_in_pieces_moves_to_the_next_line() -> None:
    assert wrapped(["twenty columns are lit", "tle"], 21) == ["twenty columns are ", "little"]


def test_a_long_word_is_cut() -> None:
    assert wrapped(["a " + "x" * 30], 21) == ["a " + "x" * 18, "x" * 12]


def test_wide_characters_count_twice() -> None:
    assert all(len(line) <= 10 for line in wrapped(["日本語の文章はとても長い。" * 3], 21))


@given(st.lists(st.text(alphabet="abc de\n", max_size=12), max_size=20), st.integers(20, 40))
def test_every_character_is_shown_and_every_line_fits(pieces: list[str], width: int) -> None:
    lines = wrapped(pieces, width)
    assert max(map(len, lines)) < width
    assert "".join("".join(lines).split()) == "".join("".join(pieces).split())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def test_control_codes_are_disarmed(terminal: Terminal) -> None:
    AnswerText(terminal).write("a\x1b]0;title\x07b\x9bc\r\td\n")
    assert terminal.getvalue() == "a\ufffd]0;title\ufffdb\ufffdc    d\n"


def test_reasoning_is_faint(terminal: Terminal) -> None:
    out = AnswerText(terminal, reasoning=True)
    for piece in ("so ", "2</think>\n\n", "It is 2."):
        out.write(piece)
    out.end()
    assert terminal.getvalue() == "\x1b[2mso \x1b[0m\x1b[2m2</think>\x1b[0m\n\nIt is 2.\n"


@pytest.mark.parametrize("text", ["a\x1b[1m\r\n", "x" * 200 + "\n", "no newline"])
def test_a_pipe_gets_exactly_the_text(text: str) -> None:
    out = io.StringIO()
    shown = AnswerText(out, reasoning=True)
    shown.write(text)
    shown.end()
    assert out.getvalue() == text + ("" if text.endswith("\n") else "\n")


def timings(tried: list[int], accepted: list[int], cycles: int, decode_ms: float) -> Timings:
    drafts = sum(accepted)
    emitted = {"prefill": 1, "draft": drafts, "correction": 0, "bonus": cycles, "plain": 0}
    return Timings(1.0, decode_ms, 0.0, cycles, 0.0, [], tried, accepted, emitted, 2 + cycles, 0)


def test_a_tally_weighs_by_count() -> None:
    tally = Tally.of(timings([10, 8], [8, 4], 10, 1000))
    tally.add(timings([10, 2, 2], [2, 2, 0], 10, 500))
    assert tally.line() == "38 tokens, 24.0 tok/s, 1.80 a cycle, accepted 50 60 0 %"
    assert tally.acceptance == "50 60 0 %"


def test_a_line_of_figures_fits_a_terminal() -> None:
    tally = Tally.of(timings([999] * 8, [999] * 8, 999, 100_000))
    assert len(tally.line("length")) <= 80
    assert tally.line("cancelled").startswith("stopped, ")


def test_figures_without_drafts() -> None:
    assert Tally.of(timings([], [], 0, 0)).line() == "1 token"
    assert Tally.of(timings([], [], 2, 100)).line() == "3 tokens, 20.0 tok/s, 1.00 a cycle, plain decoding"
