"""The command line as plain data: commands, their options and arguments, and what a value may be.

Completions and the man page are written from it. It knows typer's objects; nobody behind it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer.main

__all__ = ["Argument", "Command", "Kind", "Option", "Value", "command_tree"]

Kind = Literal["choice", "file", "folder", "model", "text"]

_FOLDERS = ("FOLDER", "DIR")
_MODELS = ("model", "models", "source")
_HUB = "ID"  # stands on the Hub alone: nothing on this machine can be offered for it


@dataclass(frozen=True)
class Value:
    """What stands behind an option, or is an argument.

    Attributes:
        kind: what may be offered for it: one of `choices`, names of files or folders, a model, or nothing.
        name: what help calls it, as FILE.
        choices: all values there are; empty where they cannot be listed.
    """

    kind: Kind
    name: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """An option: its spellings with their dashes; a switch has no value. `heading` is empty for the common ones."""

    names: tuple[str, ...]
    help: str
    value: Value | None
    repeatable: bool
    heading: str

    @property
    def brief(self) -> str:
        """The first sentence of its help."""
        return self.help.split(". ")[0].removesuffix(".")


HELP = Option(("--help", "-h"), "Show this message and exit.", None, False, "")  # typer adds it to every command


@dataclass(frozen=True)
class Argument:
    """A word that is no option. With `many`, any number of them."""

    value: Value
    help: str
    required: bool
    many: bool


@dataclass(frozen=True)
class Command:
    """A command, or a group of them.

    Attributes:
        path: the words that call it, the program's name first.
        summary: one line.
        text: all of its help; paragraphs stand apart by an empty line.
        options, arguments, commands: in the order of its help; a group has `commands`, others none.
    """

    path: tuple[str, ...]
    summary: str
    text: str
    options: tuple[Option, ...]
    arguments: tuple[Argument, ...]
    commands: tuple[Command, ...]

    def walk(self) -> Iterator[Command]:
        """This command and all below it, each before those below it."""
        yield self
        for command in self.commands:
            yield from command.walk()


def command_tree(app: typer.Typer) -> Command:
    """What an application offers, without what it hides."""
    return _command(typer.main.get_command(app), (str(app.info.name),))


def _command(found: Any, path: tuple[str, ...]) -> Command:
    shown = [parameter for parameter in found.params if not parameter.hidden]
    below = getattr(found, "commands", {})
    text = (found.help or "").strip()
    return Command(
        path,
        " ".join(text.split("\n\n")[0].split()),
        text,
        (*(_option(each) for each in shown if each.param_type_name == "option"), HELP),
        tuple(_argument(each) for each in shown if each.param_type_name == "argument"),
        tuple(_command(each, (*path, name)) for name, each in below.items() if not each.hidden),
    )


def _option(found: Any) -> Option:
    names = (*found.opts, *found.secondary_opts)
    value = None if found.is_flag or found.count else _value(found)
    return Option(names, found.help or "", value, found.multiple, found.rich_help_panel or "")


def _argument(found: Any) -> Argument:
    return Argument(_value(found), found.help or "", found.required, found.nargs == -1)


def _value(found: Any) -> Value:
    annotation = found.type_descriptor.annotation
    if get_origin(annotation) is list:
        (annotation,) = get_args(annotation)
    name = (found.metavar or "").strip(" [].") or found.name.upper()  # `required` and `many` say the rest
    if get_origin(annotation) is Literal:
        return Value("choice", name, tuple(map(str, get_args(annotation))))
    if found.name in _MODELS and name != _HUB:
        return Value("model", name)
    if annotation is Path:
        return Value("folder" if name in _FOLDERS else "file", name)
    return Value("text", name)
