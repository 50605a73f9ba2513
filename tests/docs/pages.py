"""The pages of the documentation: their fenced blocks, the commands in these, and what is code in their text.

A block of `sh` holds commands, one a line. A block of `console` holds commands behind `$ ` and below each what it
prints, where "…" stands for anything. A command that cannot run here says so in its comment, `[needs a Mac]`, for
whoever reads the page: see NEEDS. It must exist all the same.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["NEEDS", "PAGES", "ROOT", "Block", "Command", "blocks", "commands", "inline", "outside_blocks"]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What a command may need that no test has, as its comment says.
NEEDS = (
    "a GPU",
    "a Mac",
    "a checkout",
    "a display",
    "a download",
    "a launchd or systemd session",
    "an account",
    "minutes",
    "other programs",
    "root",
    "several machines",
    "that model",
)

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_NEED = re.compile(r"\[needs (?P<what>[^\]]+)\]")
_INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its language, the line it begins at, its text."""

    page: Path
    language: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def need(self) -> str:
        """What a program needs that is not here, as a comment in it says; "" if nothing."""
        return _need("\n".join(re.findall(r"#.*", self.text))) if self.language == "python" else ""


@dataclass
class Command:
    """A command.

    Attributes:
        text: as a shell takes it.
        place: page and line.
        need: what it needs that is not here; "" if nothing.
        expected: lines that are shown below it; None if none are.
    """

    text: str
    place: str
    need: str = ""
    expected: list[str] | None = field(default=None)


def blocks(page: Path) -> list[Block]:
    """All blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        inner = "\n".join(line.removeprefix(match["indent"]) for line in match["text"].split("\n"))
        found.append(Block(page, match["language"], text.count("\n", 0, match.start()) + 1, inner))
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a block; none where its language is no shell."""
    if block.language == "console":
        return _shown(block)
    return _plain(block) if block.language == "sh" else []


def inline(page: Path) -> list[str]:
    """What is written as code in the text of a page, outside blocks."""
    return _INLINE.findall(outside_blocks(page))


def outside_blocks(page: Path) -> str:
    """The text of a page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _plain(block: Block) -> list[Command]:
    found: list[Command] = []
    whole = ""
    for number, line in enumerate(block.text.split("\n"), start=block.line + 1):
        whole += line
        if whole.endswith("\\"):
            whole = whole[:-1]
            continue
        command, comment = _apart(whole)
        if _goes_on(command):
            whole += "\n"
            continue
        if command:
            found.append(Command(command, f"{block.page.relative_to(ROOT)}:{number}", _need(comment)))
        whole = ""
    return found


def _goes_on(command: str) -> bool:
    """Whether a command ends on a later line: within quotes, or behind what joins two."""
    try:
        shlex.split(command)
    except ValueError:
        return True
    return command.endswith(("|", "&&"))


def _need(comment: str) -> str:
    found = _NEED.search(comment)
    return found["what"] if found else ""


def _shown(block: Block) -> list[Command]:
    found: list[Command] = []
    for number, line in enumerate(block.text.rstrip("\n").split("\n"), start=block.line + 1):
        if line.startswith("$ "):
            command, comment = _apart(line[2:])
            found.append(Command(command, f"{block.page.relative_to(ROOT)}:{number}", _need(comment), []))
        elif found and found[-1].expected is not None:
            found[-1].expected.append(line)
    return found


def _apart(line: str) -> tuple[str, str]:
    """A line's command and its comment: a # that no quotes enclose, at the begin of a word."""
    for match in re.finditer(r"(?:^|\s)#", line):
        before = line[: match.start()]
        try:
            shlex.split(before)
        except ValueError:  # inside quotes
            continue
        return before.strip(), line[match.start() :]
    return line.strip(), ""
