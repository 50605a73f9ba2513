"""Guards the promise of max mode: however the process ends that wanted the fans, they are given back, and that is read
in `status`. Real processes and real signals; the fans are a stand-in's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from selfdraft.errors import FanError
from selfdraft.fans import watchdog as watchdogs
from selfdraft.fans.claims import Claims
from selfdraft.fans.max_mode import MaxMode, ensure_watchdog, mend
from selfdraft.fans.watchdog import Watchdog
from tests.support.thermalforge import AS_MAC, StandIn, within

HOLDER = (
    AS_MAC
    + """
import signal, sys
for each in (signal.SIGHUP, signal.SIGQUIT):  # which a test run in the background may ignore, and hands down
    signal.signal(each, signal.SIG_DFL)
from selfdraft.fans.max_mode import MaxMode
mode = MaxMode.open("test")
mode.set_busy(True)
order = sys.stdin.readline().strip()
if order == "raise":
    raise RuntimeError("as told")
if order == "close":
    mode.close()
"""
)


@contextlib.contextmanager
def holder(stand_in: StandIn) -> Iterator[subprocess.Popen[str]]:
    """A process that works in max mode, once the fans are at maximum."""
    before = len(stand_in.claims.live())
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            assert within(20, lambda: len(stand_in.claims.live()) == before + 1 and stand_in.state == "max")
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[str], how: str) -> int:
    """End a holder: by an order, or by a signal of that name."""
    if how.startswith("SIG"):
        process.send_signal(getattr(signal, how))
    else:
        assert process.stdin is not None
        process.stdin.write(how + "\n")
        process.stdin.close()
    return process.wait(20)


@pytest.mark.parametrize(
    "how", ["exit", "close", "raise", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL", "SIGSEGV"]
)
def test_however_a_holder_ends_the_fans_are_given_back(stand_in: StandIn, how: str) -> None:
    with holder(stand_in) as process:
        code = end(process, how)
        assert (code == 0) == (how in ("exit", "close"))
        if how == "close":
            assert stand_in.state == "auto"  # it waits until that is seen
        assert stand_in.settled()
    assert stand_in.calls == ["max", "auto"]
    assert stand_in.all_calls[-1] == "status"


def test_killed_before_the_fans_are_at_maximum(stand_in: StandIn) -> None:
    """`max` takes its time; it must not come after `auto`."""
    stand_in.plan("max", "slow")
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE) as process:
        assert within(20, lambda: stand_in.calls == ["max"])
        process.kill()
        process.wait(20)
        assert within(20, lambda: stand_in.state == "max")
        assert stand_in.settled()
    assert stand_in.calls == ["max", "auto"]


def test_the_watchdog_is_of_no_terminal_and_ignores_its_signals(stand_in: StandIn) -> None:
    with holder(stand_in) as process:
        pid = stand_in.claims.watchdog
        assert pid
        assert os.getsid(pid) not in (os.getsid(0), os.getsid(process.pid))
        for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            os.kill(pid, each)
        end(process, "SIGKILL")
        assert stand_in.settled()


def test_fans_are_given_back_when_the_last_of_two_is_gone(stand_in: StandIn) -> None:
    with holder(stand_in) as one, holder(stand_in) as other:
        pid = stand_in.claims.watchdog
        end(one, "SIGKILL")
        assert within(20, lambda: len(stand_in.claims.live()) == 1)
        with holder(stand_in) as third:
            assert stand_in.claims.watchdog == pid  # one for all
            assert "auto" not in stand_in.calls
            end(third, "exit")
        end(other, "SIGTERM")
        assert stand_in.settled()
    assert stand_in.calls[-1] == "auto"
    assert stand_in.calls.count("auto") == 1


def test_a_process_number_that_is_used_again_holds_nothing(stand_in: StandIn) -> None:
    """A claim of a crash may name a process that lives, which is another one by now."""
    stand_in.claims.claim("before").release()
    (claim,) = stand_in.claims.dead()
    claim.path.write_text(json.dumps({"pid": os.getpid(), "what": "before", "since": 1.0}))
    stand_in.become("max")
    assert stand_in.claims.live() == []
    assert mend(stand_in.claims)
    assert stand_in.settled()
    assert stand_in.calls == ["auto"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"pid": "x"}'])
def test_a_claim_that_cannot_be_read_counts(stand_in: StandIn, content: str) -> None:
    held = stand_in.claims.claim("before")
    (claim,) = stand_in.claims.live()
    claim.path.write_text(content)
    assert [each.pid for each in stand_in.claims.live()] == [0]
    held.release()
    assert [each.pid for each in stand_in.claims.dead()] == [0]
    assert mend(stand_in.claims)
    assert stand_in.settled()


def test_when_the_watchdog_is_killed_too_the_next_start_mends(stand_in: StandIn) -> None:
    with holder(stand_in) as process:
        pid = stand_in.claims.watchdog
        assert pid
        process.send_signal(signal.SIGSTOP)  # it would start another one
        os.kill(pid, signal.SIGKILL)
        end(process, "SIGKILL")
    assert within(20, lambda: stand_in.claims.watchdog is None and not stand_in.claims.live())
    assert stand_in.state == "max"
    with holder(stand_in) as process:  # a start in max mode is one
        end(process, "exit")
        assert stand_in.settled()
    assert not mend(stand_in.claims)  # nothing is left to mend


def test_a_killed_watchdog_is_replaced_while_the_holder_lives(stand_in: StandIn) -> None:
    with holder(stand_in) as process:
        pid = stand_in.claims.watchdog
        assert pid
        os.kill(pid, signal.SIGKILL)
        assert within(20, lambda: stand_in.claims.watchdog not in (None, 0, pid))
        end(process, "SIGKILL")
        assert stand_in.settled()


def test_two_watchdogs_at_once_are_one(stand_in: StandIn) -> None:
    held = stand_in.claims.claim("test")
    starters = [
        threading.Thread(target=ensure_watchdog, args=(stand_in.claims, stand_in.fans), daemon=True) for _ in range(4)
    ]
    for each in starters:
        each.start()
    for each in starters:
        each.join(20)
    assert within(20, lambda: stand_in.state == "max")
    held.release()
    assert stand_in.settled()
    assert stand_in.calls == ["max", "auto"]


def test_it_needs_nothing_that_might_be_gone(stand_in: StandIn) -> None:
    """What is imported is there before it begins, and is the standard library and this package."""
    script = "import sys; before = set(sys.modules); import selfdraft.fans.watchdog; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    outside = {name.split(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    assert outside == {"selfdraft"}


def test_a_claim_in_the_moment_of_its_end_is_not_overlooked(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes one then sees the lock taken, and starts no watchdog."""
    made: list[str] = []
    run = Watchdog.run

    def run_and_claim(watchdog: Watchdog) -> None:
        run(watchdog)
        if not made:
            held = stand_in.claims.claim("late")
            made.append(held.name)
            held.release()

    monkeypatch.setattr(Watchdog, "run", run_and_claim)
    watchdogs.look_after(stand_in.claims, stand_in.fans, lambda: None)
    assert made
    assert stand_in.claims.all() == []
    assert stand_in.calls == ["auto", "auto"]


def test_its_starter_may_be_gone_when_it_is_ready(stand_in: StandIn) -> None:
    def nobody_listens() -> None:
        raise BrokenPipeError

    stand_in.become("max")
    watchdogs.look_after(stand_in.claims, stand_in.fans, nobody_listens)
    assert stand_in.state == "auto"


# Inside: what would take too long with real pauses.


@pytest.fixture
def quick(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a watchdog here, over what a crash left, with short pauses; it must end by itself."""
    monkeypatch.setattr(watchdogs, "_GLANCE", 0.01)
    stand_in.claims.claim("before").release()
    stand_in.become("max")

    def run(*, timeout: float = 20, pauses: tuple[float, ...] = (0.01, 0.02)) -> None:
        fans = type(stand_in.fans)(stand_in.fans.executable, timeout)
        Watchdog(stand_in.claims, fans, pauses=pauses).run()

    return run


def test_auto_is_tried_again_until_it_works(stand_in: StandIn, quick: Any) -> None:
    stand_in.plan("auto", "fail", "fail", "fail")
    quick()
    assert stand_in.calls == ["auto"] * 4
    assert (stand_in.state, stand_in.claims.all()) == ("auto", [])
    log = stand_in.claims.log.read_text()
    assert log.count("fans automatic: `thermalforge auto` failed") == 1  # the same again is no news
    assert log.endswith("fans automatic: done\n")


@pytest.mark.parametrize("status", ["max", "stuck"])
def test_success_is_not_believed_but_looked_at(stand_in: StandIn, quick: Any, status: str) -> None:
    stand_in.plan("status", status, status)
    quick()
    assert stand_in.calls == ["auto"] * 3
    assert stand_in.claims.all() == []


def test_an_auto_that_does_nothing_is_tried_again(stand_in: StandIn, quick: Any) -> None:
    stand_in.plan("auto", "lie", "lie")
    quick()
    assert (stand_in.calls, stand_in.state) == (["auto"] * 3, "auto")


def test_a_status_that_cannot_be_read_proves_nothing(stand_in: StandIn, quick: Any) -> None:
    stand_in.plan("status", "garbage", "fail")
    quick()
    assert stand_in.calls == ["auto"] * 3


def test_a_call_that_hangs_is_tried_again(stand_in: StandIn, quick: Any) -> None:
    stand_in.plan("auto", "hang")
    quick(timeout=1.0)
    assert (stand_in.calls, stand_in.state) == (["auto"] * 2, "auto")


def test_fans_that_another_program_took_since_are_left_to_it(stand_in: StandIn, quick: Any) -> None:
    stand_in.plan("status", "between")
    quick()
    assert (stand_in.calls, stand_in.claims.all()) == (["auto"], [])


def test_fans_between_are_not_given_back_while_auto_fails(stand_in: StandIn, quick: Any) -> None:
    stand_in.plan("auto", "fail")
    stand_in.plan("status", "between")
    quick()
    assert stand_in.calls == ["auto"] * 2


def test_an_auto_that_fails_with_fans_that_are_automatic_is_enough(stand_in: StandIn, quick: Any) -> None:
    """Whoever may not move the fans has not moved them."""
    stand_in.become("auto")
    stand_in.plan("auto", "fail")
    quick()
    assert stand_in.calls == ["auto"]


def test_pauses_grow(stand_in: StandIn, quick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = [0.0]
    monkeypatch.setattr(watchdogs, "_GLANCE", 60.0)
    monkeypatch.setattr(watchdogs.time, "monotonic", lambda: clock[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    stand_in.plan("auto", *["fail"] * 10)
    with monkeypatch.context() as patch:
        patch.setattr(stand_in.fans.__class__, "_call", _without_waiting(stand_in))
        patch.setattr(watchdogs.time, "sleep", sleep)
        quick(pauses=watchdogs._PAUSES)
    assert slept == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]


def _without_waiting(stand_in: StandIn) -> Any:
    """The stand-in, called without the clock that this test has stopped."""
    failures = iter([True] * 10)

    def call(self: object, verb: str) -> str:
        if verb == "auto" and next(failures, False):
            raise FanError("as told")
        if verb == "auto":
            stand_in.become("auto")
        mode = "auto" if stand_in.state == "auto" else "manual"
        return json.dumps({"fans": [{"mode": mode, "target_rpm": 5900, "max_rpm": 5900}]})

    return call


def test_whatever_goes_wrong_does_not_end_it(stand_in: StandIn, quick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a full disk, and not a fault of our own."""
    told: list[str] = []

    def broken(claims: Claims, outcome: object) -> None:
        told.append(str(outcome))
        raise OSError("disk full")

    forget = Claims.forget
    broken_once = iter([RuntimeError("a fault")])

    def forget_late(claims: Claims, dead: Any) -> None:
        for error in broken_once:
            raise error
        forget(claims, dead)

    monkeypatch.setattr(Claims, "outcome", property(lambda self: None, broken))
    monkeypatch.setattr(Claims, "forget", forget_late)
    quick()
    assert stand_in.calls == ["auto", "auto"]
    assert stand_in.claims.all() == []
    assert "a fault" in told[0]


def test_a_claim_ends_the_wait_for_another_attempt(stand_in: StandIn, quick: Any) -> None:
    """Also the other way round: who wants the fans does not wait for one who could not give them back."""
    stand_in.plan("auto", "fail")
    thread = threading.Thread(target=quick, kwargs={"pauses": (600.0,)}, daemon=True)
    thread.start()
    assert within(20, lambda: stand_in.claims.outcome.error is not None)
    held = stand_in.claims.claim("test")
    assert within(20, lambda: list(stand_in.claims.outcome.claims) == [held.name])
    assert stand_in.calls == ["auto", "max"]
    held.release()
    thread.join(20)
    assert not thread.is_alive()
    assert (stand_in.calls, stand_in.claims.all()) == (["auto", "max", "auto"], [])


def test_a_max_that_did_not_work_is_tried_again_while_it_is_wanted(stand_in: StandIn, quick: Any) -> None:
    held = stand_in.claims.claim("test")
    stand_in.plan("max", "fail", "lie")
    stand_in.become("auto")
    thread = threading.Thread(target=quick, daemon=True)
    thread.start()
    assert within(20, lambda: stand_in.state == "max")
    held.release()
    thread.join(20)
    assert stand_in.calls == ["max", "max", "max", "auto"]


def test_a_folder_that_cannot_be_written(stand_in: StandIn) -> None:
    """Fans that nobody could give back are not taken."""
    stand_in.claims.folder.parent.parent.mkdir(parents=True, exist_ok=True)
    stand_in.claims.folder.parent.write_text("a file")
    said: list[str] = []
    mode = MaxMode(stand_in.fans, stand_in.claims, "test", linger=0.0)
    mode.warn = said.append
    mode.set_busy(True)
    assert within(20, lambda: len(said) == 1)
    mode.set_busy(False)
    assert "cannot be written" in said[0]
    assert stand_in.calls == []
