"""The command line as the documentation must have it: which commands there are, and which flags each takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import typer

from selfdraft.cli.app import app

__all__ = ["every_command", "every_flag", "problem"]

_WRAPPERS = ("sudo", "env", "exec", "nohup", "time")


def _root() -> Any:
    return typer.main.get_command(app)


def every_command() -> Iterator[tuple[str, Any]]:
    """Name and command, such as "forge build"; groups are none."""
    yield from _walk("", _root())


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    parts = getattr(command, "commands", None)
    if parts is None:
        yield name, command
        return
    for part, child in parts.items():
        yield from _walk(f"{name} {part}".strip(), child)


def every_flag() -> set[str]:
    """Flags of all commands together."""
    return {flag for _, command in every_command() for flag in _flags(command)}


def _flags(command: Any) -> set[str]:
    found = {"--help", "-h", "--version"}
    for parameter in command.params:
        found |= {*parameter.opts, *parameter.secondary_opts}
    return found


def problem(text: str) -> str:
    """Which command or flag that a command line gives selfdraft does not exist; "" if all do."""
    for part in re.split(r"\|\||&&|[|;&]", text):
        try:
            words = shlex.split(part)
        except ValueError:
            words = part.split()
        while words and ("=" in words[0] or words[0] in _WRAPPERS):
            words = words[1:]
        if words and words[0].rpartition("/")[2] == "selfdraft" and (said := _problem(words[1:])):
            return said
    return ""


def _problem(words: list[str]) -> str:
    command = _root()
    name = "selfdraft"
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return f"{name} has no command {words[0]!r}"
        name, command, words = f"{name} {words[0]}", command.commands[words[0]], words[1:]
    known = _flags(command)
    for word in words:
        flag = word.partition("=")[0]
        if re.fullmatch(r"--?[a-z][\w-]*", flag) and flag not in known:
            return f"{name} has no flag {flag!r}"
    return ""
