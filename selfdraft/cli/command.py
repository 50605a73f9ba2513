"""What makes a function a command: groups of flags as arguments, and a quiet end when nobody reads the output."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

__all__ = ["command"]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The flat function that typer reads, of one that takes groups of flags.

    Every parameter annotated with a dataclass (see `flags`) stands for the fields of that dataclass.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        try:
            function(**values)
        except BrokenPipeError as error:
            _forget_output()
            raise typer.Exit(128 + signal.SIGPIPE) from error

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]


def _forget_output() -> None:
    """Nobody reads standard output any more: point it elsewhere, or Python complains when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
