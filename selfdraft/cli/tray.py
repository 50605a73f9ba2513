"""`selfdraft tray`: the icon in the menu bar. Loads no model and no MLX: servers and searches are other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from ..errors import TrayError
from .command import command
from .flags import flag
from .terminal import dim

__all__ = ["tray"]

_PATIENCE = 120.0  # seconds in which models are found, on slow disks too


@command
def tray(
    *, start: Annotated[bool, flag("--start", "Start the server at once. Default: only from the menu.")] = False
) -> None:
    """Show an icon in the menu bar: start, watch and stop the server.

    Its menu has the model, the mode, speed and acceptance as they are
    now, the chat page and the log. A server that runs already is used.
    One that was started from the menu ends with the icon, unless the menu
    says to keep it. Choices are remembered in settings.toml.
    Needs what the extra tray installs.
    """
    import platformdirs

    from ..server.config import load_server_settings
    from ..settings import checked
    from ..tray.choices import Choices, TraySettings
    from ..tray.icon import TrayIcon, only_one
    from ..tray.process import ServerProcess
    from ..tray.tray import Server, Tray
    from .owned import KEEP, OWN
    from .server_client import health, metrics
    from .wizard import StartSettings

    settings = load_server_settings()
    chosen = Choices(checked(StartSettings, {}).model, settings.mode, checked(TraySettings, {}).keep_server)
    log = platformdirs.user_log_path("selfdraft") / "server.log"
    process = ServerProcess([sys.executable, "-m", "selfdraft.cli.owned", "serve"], log, keep=KEEP, own=OWN)
    with only_one(platformdirs.user_state_path("selfdraft") / "tray.lock"):
        watched = Tray(process, Server(health, partial(metrics, key=settings.key())), chosen)
        icon = TrayIcon(watched, _models, log)
        dim(f"the icon is in the menu bar; Ctrl-C takes it away; the server's log is {log}")
        icon.run(start=start)


def _models() -> Sequence[str]:
    """Names of the models that run here, by a process of its own: looking at them takes MLX, and memory.

    Raises:
        TrayError: they could not be found.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "selfdraft", "models", "--json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=True,
        )
        return [each["model"] for each in json.loads(done.stdout)["models"] if not each["problem"]]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise TrayError(f"models were not found ({error}); `selfdraft models` says more") from error
