"""`selfdraft connect`: tells a client about the server, on the screen or in the client's own configuration file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import SelfdraftError
from .command import command
from .flags import flag
from .terminal import say

if TYPE_CHECKING:
    from ..server.config import ServerSettings
    from .clients import Client, Endpoint, Key

__all__ = ["connect"]

Name = Literal["claude-code", "codex", "opencode", "cline", "continue", "openwebui", "litellm"]


@command
def connect(
    client: Annotated[
        Name,
        typer.Argument(
            metavar="CLIENT",
            help="claude-code, codex, opencode, cline, continue, openwebui or litellm.",
            show_default=False,
        ),
    ],
    *,
    write: Annotated[
        bool, flag("--write", "Write the settings into the client's own file, of which a copy is kept. Default: off.")
    ] = False,
    file: Annotated[
        Path | None, flag("--file", "With --write: another file. Default: the client's own.", metavar="FILE")
    ] = None,
    url: Annotated[
        str | None,
        flag(
            "--url",
            "Where the server is. Default: the one that runs on this machine, else where `selfdraft serve` would "
            "listen.",
            metavar="URL",
        ),
    ] = None,
    model: Annotated[
        str | None, flag("--model -m", "Name of the model to ask for. Default: the server's.", metavar="NAME")
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object. Default: off.")] = False,
) -> None:
    """Show or write the settings with which a client uses the server.

    The limits in them are those that the server tells, of its context and
    of an answer. An API key is never written; the client is told where to
    find it.
    """
    from .clients import CLIENTS

    to = _endpoint(url, model)
    made = CLIENTS[client](to)
    if write:
        _write(client, to, made, file, as_json=as_json)
    elif file is not None:
        raise typer.BadParameter("goes with --write only", param_hint="'--file'")
    elif as_json:
        print(json.dumps(_report(client, to, made)))
    else:
        _show(made)


def _endpoint(url: str | None, model: str | None) -> Endpoint:
    """The server and its limits; where none answers, what is configured, without them."""
    from ..server.config import load_server_settings
    from ..server.instance import find
    from .clients import Endpoint
    from .server_client import KeyNeeded, Unreachable, served_model

    settings = load_server_settings()
    running = find()
    url = _checked(url) if url else running.url if running else settings.url
    needed = False
    try:
        try:
            served = served_model(url, name=model)
        except KeyNeeded:
            needed = True
            served = served_model(url, settings.key(), model)
    except (Unreachable, KeyNeeded) as error:
        say(f"{error}. The limits of its model are left out: run this again once it answers")
        return Endpoint(url, model or _configured_model(), key=_key(settings, needed=needed or _has_key(settings)))
    return Endpoint(url, served.name, served.context, served.output, _key(settings, needed=needed))


def _has_key(settings: ServerSettings) -> bool:
    return settings.api_key is not None or settings.api_key_file is not None


def _key(settings: ServerSettings, *, needed: bool) -> Key:
    from .clients import Key

    file = settings.api_key_file
    alone = needed and file is not None and len(settings.keys()) == 1  # clients take all of a file for the key
    return Key(needed, file.expanduser().resolve() if alone and file else None)


def _configured_model() -> str:
    """The name under which a server would list the model that `selfdraft start` starts."""
    from ..server.registry import Given
    from ..settings import checked
    from .wizard import StartSettings

    return Given.parse(checked(StartSettings, {}).model).name


def _checked(url: str) -> str:
    found = re.fullmatch(r"(https?://[^/\s?#]+)(/v1)?/?", url)
    if found is None:
        raise typer.BadParameter(f"{url!r} is no address of a server, as http://127.0.0.1:8000", param_hint="'--url'")
    return found[1]


def _show(made: Client) -> None:
    """The settings on standard output, what else to know on standard error."""
    from .config_files import render

    if made.path is not None:
        say(f"for {made.path} (--write puts it there):")
    if made.format == "env":
        print("\n".join(f'export {name}="{value}"' for name, value in made.settings.items()))
    elif made.format == "form":
        width = max(map(len, made.settings))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in made.settings.items()))
    else:
        print(render(made.format, {**made.absent, **made.settings}), end="")
    for note in made.notes:
        say(note)


def _write(client: str, to: Endpoint, made: Client, file: Path | None, *, as_json: bool) -> None:
    from .config_files import write

    path = file or made.path
    if made.path is None or path is None:
        raise SelfdraftError(f"--write is not possible for {client}: {made.notes[0]}")
    written = write(path.expanduser(), made.format, made.settings, made.absent)
    if as_json:
        backup = str(written.backup) if written.backup else None
        report = {"path": str(written.path), "written": True, "changes": written.changes, "backup": backup}
        print(json.dumps(_report(client, to, made) | report))
        return
    print("\n".join([str(written.path), *(f"  {change}" for change in written.changes)]))
    if not written.changes:
        print("  nothing to change")
    if written.backup:
        print(f"  what was there before: {written.backup}")
    for note in made.notes:
        say(note)


def _report(client: str, to: Endpoint, made: Client) -> dict[str, Any]:
    return {
        "client": client,
        "url": to.url,
        "model": to.model,
        "context": to.context,
        "output": to.output,
        "path": str(made.path) if made.path else None,
        "format": made.format,
        "settings": {**made.absent, **made.settings},
        "notes": made.notes,
        "written": False,
    }
