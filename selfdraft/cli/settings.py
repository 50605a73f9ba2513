"""`selfdraft settings`: what every setting is and where from; and changing those in settings.toml. Imports no MLX."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .command import command
from .flags import flag
from .terminal import is_fancy, say

if TYPE_CHECKING:
    from ..settings import StoredSettings
    from ..settings_list import Setting

__all__ = ["SCHEMA", "app", "kinds"]

SCHEMA = 1

app = typer.Typer(help="Show the settings and where they come from, and change those in settings.toml.")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Of a setting, as `selfdraft settings get` lists it.", show_default=False)
]


def kinds() -> tuple[type[StoredSettings], ...]:
    """All settings: the engine's, the server's, those of `start` and `tray`, and where models are looked for."""
    from ..server.config import ServerSettings
    from ..settings import Settings
    from ..tray.choices import TraySettings
    from .places import ModelSettings
    from .wizard import StartSettings

    return Settings, ServerSettings, StartSettings, ModelSettings, TraySettings


@app.command()
@command
def get(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Of one setting. Default: all of them.", show_default=False),
    ] = None,
    *,
    as_json: Annotated[bool, flag("--json", "Print one JSON object, with a schema_version. Default: off.")] = False,
) -> None:
    """Show settings: the value, where it comes from, what it means.

    Values come from arguments, else SELFDRAFT_* in the environment, else
    settings.toml, else defaults. Secrets are not shown.
    """
    from ..settings import settings_path
    from ..settings_list import find_setting, list_settings

    listed = list_settings(kinds())
    if name is not None:
        _, table, own = find_setting(kinds(), name)
        listed = [each for each in listed if (each.table, each.name) == (table, own)]
    if as_json:
        shown = [each.to_dict() for each in listed]
        print(json.dumps({"schema_version": SCHEMA, "file": str(settings_path()), "settings": shown}))
    else:
        _show(listed)


@app.command("set")
@command
def set_value(
    name: Name,
    value: Annotated[
        str,
        typer.Argument(
            metavar="VALUE",
            help="As on the command line: sizes as 4GiB, several names with commas.",
            show_default=False,
        ),
    ],
) -> None:
    """Write a setting to settings.toml, once it is checked.

    Everything else in that file stays as it is, comments too.
    """
    from ..settings import remember
    from ..settings_list import find_setting, stored_form

    kind, table, own = find_setting(kinds(), name)
    stored = stored_form(kind, own, value)
    path = remember(table, {own: stored})
    print(f"{path}: {f'[{table}] ' if table else ''}{own} = {json.dumps(stored)}")
    _warn(kind, own)


@app.command()
@command
def unset(name: Name) -> None:
    """Take a setting out of settings.toml: its default holds again."""
    from ..settings import forget, settings_path
    from ..settings_list import find_setting

    table, _, own = name.rpartition(".")
    gone = forget(table, own)  # also a line that is no setting
    if not gone:
        _, table, own = find_setting(kinds(), name)
        gone = forget(table, own)
    if gone:
        print(f"{settings_path()}: {name} is gone")
    else:
        say(f"{settings_path()}: {name} is not set there")


def _warn(kind: type[StoredSettings], name: str) -> None:
    """Say that the environment wins, where it does."""
    variable = f"{kind.model_config['env_prefix']}{name}".upper()
    if any(os.environ[each] for each in os.environ if each.upper() == variable):
        say(f"{variable} is set in the environment, which wins over this file")


def _show(listed: list[Setting]) -> None:
    """A table on a terminal; in a pipe, a line each and its meaning below."""
    if not is_fancy(sys.stdout):
        for each in listed:
            print(f"{each.path} = {each.text} ({each.origin})\n    {each.meaning}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("setting", "value", "from", "meaning"):
        table.add_column(title, overflow="fold", no_wrap=title == "from")
    for each in listed:
        style = "" if each.origin == "default" else "bold"
        table.add_row(Text(each.path, "cyan"), Text(each.text, style), Text(each.origin), Text(each.meaning, "dim"))
    Console(highlight=False).print(table)
