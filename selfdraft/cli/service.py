"""`selfdraft service`: the server as a service of the operating system. Loads no model and no MLX."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import ServiceError
from .command import command
from .flags import flag, whole
from .terminal import say

if TYPE_CHECKING:
    from ..daemon import Manager, Service

__all__ = ["app"]

app = typer.Typer(help="Run the server as a service: from login on, and again after a crash (launchd, systemd).")

_KEY = "SELFDRAFT_API_KEY"


@app.command()
@command
def install(
    *,
    model: Annotated[
        str | None,
        flag("--model -m", "As `selfdraft serve` takes it. Default: what `selfdraft start` was told last.", "", "NAME"),
    ] = None,
    mode: Annotated[
        Literal["auto", "turbo", "sustained", "max"] | None,
        flag("--mode", "As `selfdraft serve` takes it. Default: as set.", "", "MODE"),
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Print the file of the service, and do nothing. Default: off.")] = False,
) -> None:
    """Have the server started now, at each login, and after a crash.

    Done again, it brings the service up to date. Address, key file and
    limits come from settings.toml, as `selfdraft settings set` writes it;
    no key is written into the service. Nothing needs sudo.
    """
    from ..daemon import find_manager
    from ..server.config import load_server_settings

    manager, service = find_manager(), _service(model, mode)
    if dry_run:
        print(manager.text(service), end="")
        return
    _check_free(manager)
    _warn_of_variables()
    for folder in (*service.writable, service.log.parent):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    load_server_settings().access()  # or the service would be refused, where nobody sees it
    outcome = manager.install(service)
    said = {"installed": "is installed and started", "changed": "is changed and started again", "unchanged": "is there"}
    print(f"the service {said[outcome]} ({manager.path}); `selfdraft service status` shows it")


@app.command()
@command
def uninstall() -> None:
    """Stop the service, and take it away. Settings and models stay."""
    from ..daemon import find_manager

    manager = find_manager()
    print(f"{manager.path} is gone" if manager.uninstall() else f"there is no service ({manager.path})")


@app.command()
@command
def start() -> None:
    """Start the service that is installed."""
    from ..daemon import find_manager

    manager = find_manager()
    _check_free(manager)
    manager.start()
    print("started; `selfdraft service status` shows it")


@app.command()
@command
def stop() -> None:
    """Stop the service until the next start or login.

    Answers that run may finish.
    """
    from ..daemon import find_manager

    find_manager().stop()
    print("stopped")


@app.command()
@command
def status(
    *, as_json: Annotated[bool, flag("--json", "Print one JSON object, with a schema_version. Default: off.")] = False
) -> None:
    """Say whether the service runs, and what its server does.

    The exit code is 0 if it runs, 1 if it does not.
    """
    from ..daemon import find_manager
    from ..server.instance import find
    from .server_client import health

    manager = find_manager()
    found = manager.status()
    server = find()
    url = server.url if server is not None and server.pid == found.pid else None
    if as_json:
        report = {"manager": manager.name, "file": str(manager.path), "installed": found.installed}
        print(json.dumps({"schema_version": 1, **report, "pid": found.pid, "running": found.running, "url": url}))
    elif not found.installed:
        say(f"there is no service ({manager.path}); `selfdraft service install` makes one")
    else:
        print(f"{manager.name}: {found.detail}{f', process {found.pid}' if found.pid else ''}", end="")
        print(f"; {url}: {health(url)['status']}" if url else "")
    if not found.running:
        raise typer.Exit(1)


@app.command()
@command
def logs(
    *,
    lines: Annotated[int, flag("--lines -n", "Lines of its end. Default: 50.", "", "N", whole)] = 50,
    follow: Annotated[bool, flag("--follow -f", "Go on as it grows, until Ctrl-C. Default: off.")] = False,
) -> None:
    """Show the log of the service."""
    from ..daemon import find_manager

    if lines < 1:
        raise typer.BadParameter(f"{lines} lines are none: give 1 or more", param_hint="'--lines'")
    manager, log = find_manager(), _log()
    if not manager.has_journal and not log.exists():
        raise ServiceError(f"there is no log yet: {log} comes with the first start of the service")
    shown = manager.log_command(log, lines, follow=follow)
    try:
        done = subprocess.run(shown, check=False)
    except FileNotFoundError as error:
        raise ServiceError(f"{shown[0]} is not installed: the log cannot be shown") from error
    if done.returncode:
        raise typer.Exit(done.returncode)


def _service(model: str | None, mode: str | None) -> Service:
    """What is to run, once it is sure that it can.

    Raises:
        ModelNotFound: no such model on this machine. InvalidRequest: settings that a server would refuse.
    """
    from ..daemon import Service
    from ..daemon.service import KEPT_VARIABLES
    from ..server.config import load_server_settings
    from ..settings import checked
    from ..source import find_model
    from .wizard import StartSettings

    name = model or checked(StartSettings, {}).model
    folder = find_model(name, fetch=False)
    name = str(folder.resolve()) if folder == Path(name).expanduser() else name
    settings = load_server_settings(mode=mode)
    _without_key(settings.loopback, settings.api_key_file)
    kept = {each: os.environ[each] for each in KEPT_VARIABLES if os.environ.get(each)}
    flags = ["--model", name, *(["--mode", mode] if mode else [])]
    return Service(flags, _log(), _writable(settings.session_folder, settings.api_key_file), kept)


def _without_key(loopback: bool, key_file: Path | None) -> None:
    """The key of the environment is not written into a service: is there another, where one is needed?

    Raises:
        ServiceError: there is not.
    """
    if key_file is None and not loopback:
        raise ServiceError(
            "the server can be reached from other machines, and its key would have to stand in the service: keep it in "
            "a file instead, `selfdraft settings set api_key_file ~/.config/selfdraft/keys` (made with a new key)"
        )


def _writable(sessions: Path, key_file: Path | None) -> list[Path]:
    """Folders that a server writes to: its own, the Hub's cache, and where warm prefixes and keys are kept."""
    import platformdirs

    from ..hub.cache import cache_folder

    folders = [
        platformdirs.user_cache_path("selfdraft"),
        platformdirs.user_config_path("selfdraft"),
        platformdirs.user_data_path("selfdraft"),
        platformdirs.user_state_path("selfdraft"),
        sessions,
        cache_folder(),
        *([key_file.expanduser().parent] if key_file else []),
    ]
    return list(dict.fromkeys(folder.absolute() for folder in folders))


def _log() -> Path:
    import platformdirs

    return platformdirs.user_log_path("selfdraft") / "service.log"


def _check_free(manager: Manager) -> None:
    """No server by hand stands in the way.

    Raises:
        ServiceError: one does.
    """
    from ..server.instance import find

    running = find()
    if running is not None and running.pid != manager.status().pid:
        raise ServiceError(
            f"a server runs already at {running.url} (process {running.pid}), outside of the service: "
            "`selfdraft stop` it first"
        )


def _warn_of_variables() -> None:
    """Say which settings of this shell a service will not see."""
    from ..settings_list import list_settings
    from .settings import kinds

    unseen = [each for each in list_settings(kinds()) if each.origin == "environment"]
    for each in unseen:
        remedy = f"`selfdraft settings set {each.path} VALUE`"
        if each.variable == _KEY:
            remedy = "a file of keys, `selfdraft settings set api_key_file FILE`"
        say(f"{each.variable} is set in this shell alone, and the service does not see it: {remedy}")
