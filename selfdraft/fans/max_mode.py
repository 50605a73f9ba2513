"""Max mode of one model: claims the fans while it is busy and for some seconds after. Knows no engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import platformdirs

from ..errors import FanError
from . import detached
from .claims import Claims, Held
from .thermalforge import ThermalForge, find

__all__ = ["MaxMode", "ensure_watchdog", "mend", "user_claims"]

log = logging.getLogger(__name__)

_LINGER = 5.0  # seconds without work before the fans are given back: the next turn may come soon
_GLANCE = 0.25


class MaxMode:
    """Fans at maximum from the first moment of work to some seconds after the last.

    Nothing here makes a caller wait, `close` excepted: a thread does it, which lives while the fans are claimed.

    Args:
        what: for what they are claimed, in a few words.
        linger: seconds without work before they are given back.

    Attributes:
        warn: called with what a user should know, each text once.
    """

    def __init__(self, fans: ThermalForge, claims: Claims, what: str, *, linger: float = _LINGER) -> None:
        self.warn: Callable[[str], object] = log.warning
        self._fans = fans
        self._claims = claims
        self._what = what
        self._linger = linger
        self._changed = threading.Condition()
        self._busy = False
        self._idle_since = 0.0  # clock time; of no meaning while busy
        self._closed = False
        self._thread: threading.Thread | None = None
        self._said: set[str] = set()

    @classmethod
    def open(cls, what: str) -> MaxMode:
        """For this user.

        Raises:
            FanError: no fans can be held here: no Mac, no ThermalForge, no fans.
        """
        fans = find()
        fans.status()
        return cls(fans, user_claims(), what)

    def set_busy(self, busy: bool) -> None:
        """Say whether there is work; from any thread, as often as you like."""
        with self._changed:
            if busy == self._busy or self._closed:
                return
            self._busy = busy
            self._idle_since = time.monotonic()
            if busy and self._thread is None:
                self._thread = threading.Thread(target=self._keep, name="max-mode", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """Give the fans back for good, and wait so many seconds at most until they are; then it is said that they are
        not. Fans that others claim, too, are not waited for.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        end = time.monotonic() + timeout
        if thread is not None:
            thread.join(timeout)
        while self._claims.dead() and not self._claims.live():
            if time.monotonic() > end:
                why = self._claims.outcome.error or "ThermalForge is slow"
                self._say(f"the fans are not given back yet ({why}); a watchdog goes on trying: `selfdraft max status`")
                return
            time.sleep(_GLANCE / 10)

    def _keep(self) -> None:
        """The thread: claims the fans, and lets go when there was no work for a while."""
        while True:
            held = self._claim()
            self._await_rest(held)
            if held is not None:
                held.release()
            with self._changed:
                if self._closed or not self._busy:
                    self._thread = None
                    return

    def _claim(self) -> Held | None:
        try:
            held = self._claims.claim(self._what)
            try:
                ensure_watchdog(self._claims, self._fans)
            except FanError:
                held.withdraw()
                raise
        except FanError as error:
            self._say(str(error))
            return None
        return held

    def _await_rest(self, held: Held | None) -> None:
        while True:
            with self._changed:
                left = self._idle_since + self._linger - time.monotonic()
                if self._closed or (not self._busy and left <= 0):
                    return
                self._changed.wait(_GLANCE if self._busy else min(left, _GLANCE))
            if held is not None:
                self._look_at_watchdog(held)

    def _look_at_watchdog(self, held: Held) -> None:
        """There must be one, also if the first was killed; what it says of our claim the user hears."""
        try:
            ensure_watchdog(self._claims, self._fans)
        except FanError as error:
            self._say(str(error))
        outcome = self._claims.outcome
        if outcome.error and held.name in outcome.claims:
            self._say(outcome.error)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.warn(text)


def user_claims() -> Claims:
    """The claims of this user."""
    return Claims(platformdirs.user_state_path("selfdraft") / "fans")


def ensure_watchdog(claims: Claims, fans: ThermalForge) -> None:
    """Have a watchdog look after the claims that are there now.

    Raises:
        FanError: none could be started.
    """
    if claims.watchdog is None:
        detached.start("selfdraft.fans.watchdog", str(claims.folder), str(fans.executable))


def mend(claims: Claims) -> bool:
    """Start a watchdog where there are claims and none looks after them any more: it was killed, too.

    Returns:
        Whether that was so.

    Raises:
        FanError: none could be started.
    """
    if not claims.all() or claims.watchdog is not None:
        return False
    ensure_watchdog(claims, find())
    return True
