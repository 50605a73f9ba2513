"""Fan control, which mode max wants on a Mac: whether ThermalForge is there, what it says, and who holds the fans."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ..errors import FanError
from .context import Context
from .finding import Finding
from .registry import check

__all__: list[str] = []

_EXPECTED = "automatic, or held by a process that runs and is watched"


@check("fans")
def _fans(context: Context) -> Iterator[Finding]:
    from ..fans.max_mode import user_claims
    from ..fans.thermalforge import INSTALL, find

    if sys.platform != "darwin":
        yield Finding("fans", "skip", "fans are controlled on macOS alone")
        return
    try:
        thermalforge = find()
    except FanError:
        yield Finding("fans", "skip", "ThermalForge is not installed, and only mode max wants it", fix=INSTALL)
        return
    claims = user_claims()
    try:
        status = thermalforge.status()
    except FanError as error:
        yield Finding("fans", "warn", str(error), _EXPECTED, "see `selfdraft max status`, or run without mode max")
        return
    holders = ", ".join(claim.name for claim in claims.live()) or "nobody here"
    observed = f"{status}, held by {holders}; ThermalForge: {thermalforge.executable}"
    left = claims.dead() or (claims.live() and claims.watchdog is None)
    if left:
        yield Finding("fans", "warn", f"{observed}; nobody watches over them", _EXPECTED, "selfdraft max off")
    else:
        yield Finding("fans", "ok", observed, _EXPECTED)
