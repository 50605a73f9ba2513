"""`selfdraft cache`: the warm prefixes on disk. Imports no MLX and loads no model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SelfdraftError
from .command import command
from .flags import flag
from .terminal import say

if TYPE_CHECKING:
    from ..sessions.disk.upkeep import Group

__all__ = ["app"]

app = typer.Typer(help="Look after the warm prefixes of past conversations that are kept on disk.")

_SHOWN = 12  # characters of a hash

Folder = Annotated[
    Path | None,
    flag("--dir", "Where they are. Default: $SELFDRAFT_SSD_SESSION_CACHE_DIR, else the user's cache.", metavar="DIR"),
]


@app.command("list")
@command
def show(
    *,
    folder: Folder = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object, with a schema_version. Default: off.")] = False,
) -> None:
    """List what is kept: records, tokens and bytes, by model and owner.

    What was used last comes first. Files that several need count for each.
    """
    from ..sessions.disk.upkeep import survey

    folder, most = _place(folder)
    with _one_line_errors(folder):
        found = survey(folder)
    if as_json:
        groups = [dataclasses.asdict(group) for group in found.groups]
        report = {"schema_version": 1, "folder": str(folder), "bytes": found.bytes, "max_bytes": most, "groups": groups}
        print(json.dumps(report))
        return
    print(f"{folder}: {_megabytes(found.bytes)} of {_megabytes(most)}")
    if found.groups:
        _table(found.groups)


@app.command()
@command
def verify(*, folder: Folder = None) -> None:
    """Read every file and compare it with the hash it was stored under.

    What is damaged is deleted, unless a process uses the folder. The exit
    code is 1 if anything was.
    """
    from ..sessions.disk.upkeep import check

    folder, _ = _place(folder)
    with _one_line_errors(folder):
        found = check(folder)
    if found.index:
        say(f"the index of {folder} was damaged: everything there is deleted")
        raise typer.Exit(1)
    records = f"{found.records} record{'' if found.records == 1 else 's'}"
    if found.damaged:
        then = (
            "deleted" if found.dropped else "left there, for a process uses the folder; it forgets what it cannot read"
        )
        say(f"{found.damaged} of {records} in {folder} damaged, or behind one that is: {then}")
        raise typer.Exit(1)
    print(f"{records}, {_megabytes(found.bytes)}: all as they were written")


@app.command()
@command
def clear(
    *, folder: Folder = None, yes: Annotated[bool, flag("--yes -y", "Do not ask. Default: ask.")] = False
) -> None:
    """Delete everything that is kept."""
    from ..sessions.disk.upkeep import empty

    folder, _ = _place(folder)
    if not yes:
        try:
            answer = input(f"delete all warm prefixes in {folder}? [y/N]: ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            say("nothing is deleted; --yes answers the question beforehand")
            raise typer.Exit(1)
    with _one_line_errors(folder):
        print(f"{_megabytes(empty(folder))} deleted in {folder}")


@app.command()
@command
def gc(
    *,
    folder: Folder = None,
    keep: Annotated[
        str,
        flag(
            "--keep",
            "Model whose prefixes stay: the first characters of its identity, as `selfdraft cache list` shows it; "
            "last: the one used last; all: every model's. Default: last.",
            metavar="WHICH",
        ),
    ] = "last",
) -> None:
    """Delete what is no longer of use.

    That is: prefixes of other models than --keep says, files that nothing
    refers to, and, past the limit of the folder, what was used longest ago.
    """
    from ..sessions.disk.upkeep import collect

    folder, most = _place(folder)
    with _one_line_errors(folder):
        print(f"{_megabytes(collect(folder, most, keep))} deleted in {folder}")


def _place(folder: Path | None) -> tuple[Path, int]:
    """Where the warm prefixes are, and how many bytes they may take."""
    from ..settings import load_settings

    settings = load_settings(ssd_session_cache_dir=folder)
    return settings.session_folder, settings.ssd_session_cache_max_bytes


@contextlib.contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    from ..sessions.disk.upkeep import Held

    try:
        yield
    except Held as held:
        who = f"process {held.pid}" if held.pid else "another process"
        raise SelfdraftError(f"{who} uses {folder}; stop it (a server: `selfdraft stop`), and try again") from held
    except sqlite3.Error as error:
        raise SelfdraftError(
            f"the index in {folder} is unreadable ({error}); with no process at it `selfdraft cache verify` mends it"
        ) from error


def _table(groups: list[Group]) -> None:
    rows = [("model", "identity", "owner", "records", "tokens", "size")]
    rows += [
        (
            group.model,
            group.identity[:_SHOWN],
            group.scope[:_SHOWN],
            f"{group.records:,}",
            f"{group.tokens:,}",
            _megabytes(group.bytes),
        )
        for group in groups
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    for row in rows:
        left = [text.ljust(width) for text, width in zip(row[:3], widths[:3], strict=True)]
        right = [text.rjust(width) for text, width in zip(row[3:], widths[3:], strict=True)]
        print("  ".join(left + right))


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
