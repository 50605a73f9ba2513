"""Opening a page or a file with the user's own program for it. Knows no server."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import webbrowser
from pathlib import Path

from ..errors import TrayError

__all__ = ["open_file", "open_page"]


def open_page(url: str) -> None:
    """Open a page in the user's browser.

    Raises:
        TrayError: there is none.
    """
    if not webbrowser.open(url):
        raise TrayError(f"no browser could be opened: the page is at {url}")


def open_file(path: Path) -> None:
    """Open a file with what the desktop opens it with.

    Raises:
        TrayError: it is not there, or nothing opens it.
    """
    if not path.exists():
        raise TrayError(f"there is no log yet: {path} comes with the first server that is started here")
    opener = "open" if sys.platform == "darwin" else "xdg-open"
    if shutil.which(opener) is None:
        raise TrayError(f"{opener} is not installed: the log is {path}")
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # Some openers stay until the file is closed again.
    threading.Thread(target=subprocess.run, args=([opener, str(path)],), kwargs=quiet, daemon=True).start()
