"""The server as a service of the operating system, kept up by it: launchd on macOS, systemd on Linux.

`service.py` is what both have; `find_manager` chooses. Nothing here asks for more rights than the user has.
"""

from __future__ import annotations

import sys

from ..errors import ServiceError
from .launchd import Launchd
from .service import Manager, Service
from .systemd import Systemd

__all__ = ["Manager", "Service", "find_manager"]


def find_manager() -> Manager:
    """The service manager of this system.

    Raises:
        ServiceError: there is none that is known here.
    """
    if sys.platform == "darwin":
        return Launchd()
    if sys.platform == "linux":
        return Systemd()
    raise ServiceError(
        f"services are known for macOS (launchd) and Linux (systemd), and this is {sys.platform}: run "
        "`selfdraft serve` under what starts programs there"
    )
