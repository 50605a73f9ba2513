"""`selfdraft max`: a Mac's fans at maximum until they are not wanted so. Loads no model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import FanError
from .command import command
from .flags import flag
from .terminal import say

if TYPE_CHECKING:
    from ..fans.claims import Claim, Claims
    from ..fans.thermalforge import FanStatus

__all__ = ["app"]

app = typer.Typer(help="Hold the fans of a Mac at maximum (needs ThermalForge).")

_GLANCE = 0.05
_HOLDING = 40.0  # seconds in which the fans of any Mac can be unlocked
_GIVING_BACK = 15.0


@app.command()
@command
def on() -> None:
    """Hold the fans at maximum until `selfdraft max off`.

    That outlives the terminal. If what holds them dies in any way, a
    watchdog gives them back.
    """
    from ..fans import detached
    from ..fans.max_mode import ensure_watchdog, user_claims
    from ..fans.thermalforge import find

    fans, claims = find(), user_claims()
    fans.status()
    try:
        if not _kept(claims):
            detached.start("selfdraft.fans.keeper", str(claims.folder), str(fans.executable))
        ensure_watchdog(claims, fans)
        kept = {claim.name for claim in _kept(claims)}
        if not _wait(_HOLDING, lambda: kept <= set(claims.outcome.claims)) or claims.outcome.error:
            raise FanError(claims.outcome.error or f"`thermalforge max` takes longer than {_HOLDING:g} s")
    except BaseException:
        _end_keepers(claims)
        raise
    print(
        "fans at maximum, also when this terminal is closed, until `selfdraft max off`; "
        f"a watchdog (process {claims.watchdog}) gives them back if anything dies"
    )


@app.command()
@command
def off() -> None:
    """End `selfdraft max on`, and see that the fans are automatic again.

    Models that run in the mode max go on holding them.
    """
    from ..fans.max_mode import ensure_watchdog, user_claims
    from ..fans.thermalforge import find

    fans, claims = find(), user_claims()
    _end_keepers(claims)
    ensure_watchdog(claims, fans)
    _wait(_GIVING_BACK, lambda: bool(claims.live()) or _settled(claims))
    if others := claims.live():
        print(f"fans still at maximum, for {_names(others)}; they are given back when that ends")
    elif not _settled(claims):
        why = claims.outcome.error or "ThermalForge is slow"
        raise FanError(
            f"the fans are not given back yet ({why}); a watchdog (process {claims.watchdog}) goes on trying"
        )
    else:
        print(f"fans: {fans.status()}")


@app.command()
@command
def status(
    *, as_json: Annotated[bool, flag("--json", "Print one JSON object, with a schema_version. Default: off.")] = False
) -> None:
    """Say how the fans are, who holds them, and which process the watchdog is.

    Fans that a crash left at maximum are given back.
    """
    from ..fans.max_mode import mend, user_claims
    from ..fans.thermalforge import find

    claims = user_claims()
    try:
        fans = find()
        if mend(claims):
            say("the watchdog of the fans was killed: there is a new one")
            _wait(_GIVING_BACK, lambda: bool(claims.live()) or _settled(claims))
        found = fans.status()
    except FanError as error:
        if as_json:
            print(json.dumps({"schema_version": 1, "fans": None, "error": str(error), **_holders(claims)}))
            raise typer.Exit(1) from error
        raise
    if as_json:
        report = {"schema_version": 1, "fans": str(found), "rpm": [fan.rpm for fan in found.fans]}
        print(json.dumps({**report, "error": claims.outcome.error, **_holders(claims)}))
        return
    _show(claims, found)


def _show(claims: Claims, found: FanStatus) -> None:
    speeds = ", ".join("unknown" if fan.rpm is None else f"{fan.rpm:,} rpm" for fan in found.fans)
    print(f"fans: {found} ({speeds})")
    holders = claims.live()
    print(f"held for: {_names(holders) or 'nobody'}")
    print(f"watchdog: {f'process {claims.watchdog}' if claims.watchdog is not None else 'none is needed'}")
    if claims.watchdog is not None and claims.outcome.error:
        say(claims.outcome.error)
    elif not holders and found.states - {"automatic"}:
        say("no process of Selfdraft holds them; `selfdraft max off` gives them back")


def _holders(claims: Claims) -> dict[str, object]:
    holders = [{"pid": each.pid, "what": each.what, "since": each.since} for each in claims.live()]
    return {"holders": holders, "watchdog": claims.watchdog}


def _names(claims: Sequence[Claim]) -> str:
    return ", ".join(f"{each.what} ({each.pid})" for each in claims)


def _kept(claims: Claims) -> list[Claim]:
    """Claims of `max on`."""
    from ..fans.keeper import KEPT

    return [claim for claim in claims.live() if claim.what == KEPT and claim.pid > 0]


def _end_keepers(claims: Claims) -> None:
    for claim in _kept(claims):
        with contextlib.suppress(ProcessLookupError):
            os.kill(claim.pid, signal.SIGTERM)
    _wait(_GIVING_BACK, lambda: not _kept(claims))


def _settled(claims: Claims) -> bool:
    """Whether nobody claims the fans, and they are given back."""
    return not claims.all() and claims.watchdog is None


def _wait(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold in time."""
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(_GLANCE)
    return held
