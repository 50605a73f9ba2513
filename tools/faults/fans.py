"""Faults of max mode: of who holds the fans, and of giving them back."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        "a process that died holds the fans for ever",
        "fans/claims.py",
        "        return True\n    return False",
        "        return True\n    return True",
        "tests/fans/test_watchdog.py -k however",
    ),
    Fault(
        "fans are given back when the first of several is gone",
        "fans/watchdog.py",
        "if not live:",
        "if not live or dead:",
        "tests/fans/test_watchdog.py -k last_of_two",
    ),
    Fault(
        "fans count as given back unseen",
        "fans/watchdog.py",
        'if status.states != {"automatic"}:',
        "if False:",
        "tests/fans/test_watchdog.py",
    ),
    Fault(
        "fans are given back once, whether or not it works",
        "fans/watchdog.py",
        'if self._attempt("automatic", self._give_back, dead):',
        'if self._attempt("automatic", self._give_back, dead) or True:',
        "tests/fans/test_watchdog.py -k tried_again",
    ),
    Fault(
        "fans of another program are fought for",
        "fans/watchdog.py",
        'if not status.states <= {"automatic", "other"}:',
        "if True:",
        "tests/fans/test_watchdog.py -k another_program",
    ),
    Fault(
        "a max that did nothing is believed",
        "fans/watchdog.py",
        'if status.states != {"max"}:',
        "if False:",
        "tests/fans/test_watchdog.py -k max_that",
    ),
    Fault(
        "attempts come ever as quickly",
        "fans/watchdog.py",
        "self._pauses[min(self._failures, len(self._pauses)) - 1]",
        "self._pauses[0]",
        "tests/fans/test_watchdog.py -k pauses_grow",
    ),
    Fault(
        "the terminal ends the watchdog",
        "fans/watchdog.py",
        "signal.signal(each, signal.SIG_IGN)",
        "pass",
        "tests/fans/test_watchdog.py -k ignores_its_signals",
    ),
    Fault(
        "a claim in the moment of the watchdog's end has none",
        "fans/watchdog.py",
        "lock = claims.watch() if claims.all() else None",
        "lock = None",
        "tests/fans/test_watchdog.py -k overlooked",
    ),
    Fault(
        "the watchdog goes with the terminal's session",
        "fans/detached.py",
        "start_new_session=True",
        "start_new_session=False",
        "tests/fans/test_watchdog.py tests/cli/test_max.py -k terminal",
    ),
    Fault(
        "a fan that stands still is another program's",
        "fans/thermalforge.py",
        'return "other" if target >= lowest else "unclear"',
        'return "other"',
        "tests/fans/test_thermalforge.py",
    ),
    Fault(
        "what a call that hangs has started goes on",
        "fans/thermalforge.py",
        "os.killpg(process.pid, signal.SIGKILL)",
        "process.kill()",
        "tests/fans/test_thermalforge.py -k hangs",
    ),
    Fault(
        "each turn toggles the fans",
        "fans/max_mode.py",
        "left = self._idle_since + self._linger - time.monotonic()",
        "left = self._idle_since - time.monotonic()",
        "tests/fans/test_max_mode.py tests/server/test_max_mode.py -k quick_succession",
    ),
    Fault(
        "what a crash left is overlooked",
        "fans/max_mode.py",
        "if not claims.all() or claims.watchdog is not None:",
        "if not claims.live() or claims.watchdog is not None:",
        "tests/cli/test_max.py -k mends",
    ),
    Fault(
        "fans are claimed without a watchdog",
        "fans/max_mode.py",
        "                held.withdraw()\n                raise\n",
        "                pass\n",
        "tests/fans/test_max_mode.py -k without_a_watchdog",
    ),
    Fault(
        "a killed watchdog is not missed",
        "fans/max_mode.py",
        "                self._look_at_watchdog(held)\n",
        "                pass\n",
        "tests/fans/test_watchdog.py -k replaced",
    ),
    Fault(
        "fans stay at maximum when all is generated",
        "engine/engine.py",
        "self.on_rows(False)",
        "pass",
        "tests/server/test_max_mode.py -k follow",
    ),
    Fault(
        "a server ends without its fans being given back",
        "server/service.py",
        "self._llm.max_mode.close()",
        "pass",
        "tests/server/test_max_mode.py -k quick_succession",
    ),
    Fault(
        "a mode that cannot be had is taken for sustained unasked",
        "settings.py",
        "            thermalforge.find()\n",
        "            pass\n",
        "tests/fans/test_max_mode.py -k refused",
    ),
    Fault(
        "max off ends what others hold",
        "cli/max.py",
        "if claim.what == KEPT and claim.pid > 0]",
        "if claim.pid > 0]",
        "tests/cli/test_max.py -k off_leaves",
    ),
]
