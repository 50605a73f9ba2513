"""What the icon shows at a moment: the state of the server and its figures, in words. Knows no server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Reading", "State"]

State = Literal["stopped", "starting", "serving", "decoding", "stopping", "crashed"]


@dataclass(frozen=True)
class Reading:
    """How the server is.

    Attributes:
        state: "serving" is ready and idle, "decoding" has answers that run.
        model: the one that runs, else the one that would be started.
        url: where it listens; empty while it does not.
        ours: whether this icon's process started it.
        running, waiting: answers.
        speed: tokens a second, over the last seconds of decoding; None before there were any.
        acceptance: accepted / tried drafts in those seconds; None where nothing was drafted.
        problem: what went wrong, in one line.
    """

    state: State
    model: str
    url: str = ""
    ours: bool = False
    running: int = 0
    waiting: int = 0
    speed: float | None = None
    acceptance: float | None = None
    problem: str = ""

    @property
    def alive(self) -> bool:
        """Whether there is a server."""
        return self.state not in ("stopped", "crashed")

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self.state in ("serving", "decoding")

    @property
    def headline(self) -> str:
        """State and model, or what went wrong."""
        if self.state == "crashed":
            return f"Crashed: {self.problem}"
        if self.problem:
            return f"{self.state.capitalize()}: {self.problem}"
        return self.state.capitalize() if self.state == "stopped" else f"{self.state.capitalize()} {self.short_model}"

    @property
    def figures(self) -> str:
        """Speed, acceptance and load; empty where there are none."""
        parts = [] if self.speed is None else [f"{self.speed:.1f} tok/s"]
        if self.acceptance is not None:
            parts.append(f"accepted {100 * self.acceptance:.0f}%")
        if self.running + self.waiting > 1:
            parts.append(f"{self.running} running, {self.waiting} waiting")
        return " · ".join(parts)

    @property
    def short_model(self) -> str:
        """The model's name without its folder or owner."""
        return self.model.rstrip("/").rsplit("/", 1)[-1]
