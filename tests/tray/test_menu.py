"""Guards the menu as data, and what is drawn of it and of the icon: every state tells itself from every other."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, get_args

import numpy as np
import pytest

from selfdraft.tray.choices import Choices
from selfdraft.tray.menu import Entry, menu
from selfdraft.tray.picture import picture
from selfdraft.tray.reading import Reading, State
from selfdraft.tray.x11_menu import draw

STATES = get_args(State)


@dataclass
class Actions:
    done: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.done.append((name, *given))


def lines(reading: Reading, chosen: Choices | None = None, models: tuple[str, ...] = ()) -> list[Entry]:
    return menu(reading, chosen or Choices("reference", "auto"), models, ("auto", "turbo"), Actions())


def texts(entries: list[Entry]) -> list[str]:
    return [entry.text for entry in entries]


def by(entries: Any, text: str) -> Entry:
    return next(entry for entry in entries if entry.text.startswith(text))


def test_what_can_be_done_follows_the_state() -> None:
    stopped = lines(Reading("stopped", "reference"))
    assert texts(stopped)[0] == "Stopped"
    assert by(stopped, "Start reference").default
    assert by(stopped, "Open the chat page").action is None
    assert "Stop" not in texts(stopped)
    serving = lines(Reading("serving", "reference", "http://127.0.0.1:8000", ours=True))
    assert by(serving, "Open the chat page").default
    assert by(serving, "Stop").action is not None
    assert by(serving, "127.0.0.1:8000").action is None
    assert by(lines(Reading("crashed", "reference", problem="no memory")), "Start again").default
    for state in STATES:
        assert sum(entry.default for entry in lines(Reading(state, "reference"))) <= 1


def test_quitting_says_what_it_does_to_the_server() -> None:
    ours = Reading("serving", "m", ours=True)
    assert texts(lines(ours))[-1] == "Quit, and stop the server"
    assert texts(lines(ours, Choices("m", "auto", keep_server=True)))[-1] == "Quit"
    assert texts(lines(Reading("serving", "m")))[-1] == "Quit"


def test_entries_do_what_they_say() -> None:
    actions = Actions()
    entries = menu(Reading("stopped", "m"), Choices("b", "turbo"), ["a", "b"], ("auto",), actions)
    models, modes = by(entries, "Model: b").entries, by(entries, "Mode: turbo").entries
    assert [(entry.text, entry.checked) for entry in models] == [("a", False), ("b", True)]
    assert [entry.text for entry in modes if entry.action] == ["auto"]
    assert [entry.text for entry in modes if entry.checked] == ["turbo"]
    chosen = (models[0], models[1], modes[0], by(entries, "Keep the server"), by(entries, "Start"))
    for entry in chosen:
        assert entry.action is not None
        entry.action()
    assert actions.done == [
        ("choose_model", "a"),
        ("choose_model", "b"),
        ("choose_mode", "auto"),
        ("choose_keep", True),
        ("start",),
    ]


def test_models_may_still_be_looked_for() -> None:
    entries = menu(Reading("stopped", "m"), Choices("m", "auto"), None, ("auto",), Actions())
    assert texts(list(by(entries, "Model").entries)) == ["m", "looking for others ..."]


def test_long_names_and_many_models_keep_the_menu_small() -> None:
    many = tuple(f"/models/{'x' * 200}/{index}" for index in range(50))
    entries = lines(Reading("crashed", "m", problem="y" * 500), models=many)
    listed = by(entries, "Model").entries
    assert len(listed) == 22
    assert listed[0].text.endswith("/0")
    assert "30 more" in listed[-1].text
    assert max(len(text) for text in (*texts(entries), *(entry.text for entry in listed))) <= 90


@pytest.mark.parametrize("size", [16, 22, 32, 64])
def test_icons_differ_in_shape_and_colour(size: int) -> None:
    drawn = {state: np.asarray(picture(state, size), dtype=float) for state in STATES if state != "stopping"}
    for one, other in combinations(drawn, 2):
        shapes = [drawn[state].min(axis=2) > 200 for state in (one, other)]
        assert np.mean(shapes[0] != shapes[1]) > 0.02, (one, other)  # the white sign, whatever the colours
        assert np.abs(drawn[one][0, 0] - drawn[other][0, 0]).sum() > 60, (one, other)
    for image in drawn.values():
        assert 0.03 < np.mean(image.min(axis=2) > 200) < 0.6  # neither empty nor full


def test_an_icon_fills_its_place() -> None:
    image = np.asarray(picture("serving", 40, 24))
    assert image.shape == (24, 40, 3)
    assert (image[:, :5] == image[0, 0]).all()


def test_a_menu_shows_what_is_chosen_and_what_does_nothing() -> None:
    entries = [Entry("one", lambda: None, checked=True), Entry("one")]
    plain, chosen = (np.asarray(draw(entries, index)).astype(int) for index in (None, 0))
    assert (plain[6:32] != chosen[6:32]).any()
    assert (plain[32:] == chosen[32:]).all()
    darkest = [plain[top : top + 26, 30:].min() for top in (6, 32)]
    assert darkest[0] < darkest[1]
