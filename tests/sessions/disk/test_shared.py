"""Guards what all stores of a process share: made by the first, used by all, closed by the last."""

from __future__ import annotations

from typing import Any, cast

from selfdraft.sessions.disk.archive import Archive
from selfdraft.sessions.disk.shared import Shared
from selfdraft.sessions.disk.writer import Writer


class Recording:
    """A writer that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def flush(self, timeout: float) -> None:
        self.told.append(f"flush {timeout}")

    def close(self, timeout: float) -> None:
        self.told.append(f"close {timeout}")


def test_made_once_and_closed_by_the_last() -> None:
    shared, made = Shared(), cast("list[tuple[Any, Any]]", [])

    def opened() -> tuple[Archive | None, Writer | None]:
        made.append((object(), Recording()))
        return made[-1]

    assert shared.take(opened) is made[0]
    assert shared.take(opened) is made[0]
    shared.give(1.0)
    assert made[0][1].told == ["flush 1.0"]
    shared.give(2.0)
    assert made[0][1].told == ["flush 1.0", "close 2.0"]
    assert shared.take(opened) is made[1]  # it was given back, so it is opened again


def test_a_folder_that_cannot_be_had_is_asked_for_once() -> None:
    shared, asked = Shared(), []

    def refused() -> tuple[Archive | None, Writer | None]:
        asked.append("")
        return None, None

    assert shared.take(refused) == shared.take(refused) == (None, None)
    shared.give(0)
    shared.give(0)
    assert len(asked) == 1
