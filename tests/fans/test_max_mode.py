"""Guards when fans are at maximum: from the first work to some seconds after the last, without making work wait; and
that a mode that cannot be had is refused where it was asked for, and named where it was only stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import selfdraft
from selfdraft.errors import FanError, InvalidRequest
from selfdraft.fans import max_mode, thermalforge
from selfdraft.fans.max_mode import MaxMode
from selfdraft.llm import LLM
from selfdraft.params import SamplingParams
from selfdraft.settings import load_settings
from tests.support.thermalforge import StandIn, within

SHORT = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture
def mode(stand_in: StandIn) -> Iterator[MaxMode]:
    mode = MaxMode(stand_in.fans, stand_in.claims, "test", linger=0.3)
    yield mode
    mode.close()


def test_fans_are_at_maximum_while_there_is_work(stand_in: StandIn, mode: MaxMode) -> None:
    assert stand_in.calls == []
    mode.set_busy(True)
    assert within(20, lambda: stand_in.state == "max")
    assert [claim.what for claim in stand_in.claims.live()] == ["test"]
    mode.set_busy(False)
    assert stand_in.settled()
    mode.set_busy(True)
    assert within(20, lambda: stand_in.state == "max")
    mode.close()
    assert stand_in.state == "auto"
    assert stand_in.calls == ["max", "auto", "max", "auto"]


def test_turns_in_quick_succession_do_not_toggle(stand_in: StandIn) -> None:
    mode = MaxMode(stand_in.fans, stand_in.claims, "test", linger=30.0)
    for _ in range(3):
        mode.set_busy(True)
        assert within(20, lambda: stand_in.state == "max")
        mode.set_busy(False)
        assert not within(0.3, lambda: not stand_in.claims.live())
    mode.close()
    assert stand_in.calls == ["max", "auto"]


def test_nobody_waits_for_thermalforge(stand_in: StandIn, mode: MaxMode) -> None:
    stand_in.plan("max", "slow")
    begin = time.monotonic()
    mode.set_busy(True)
    mode.set_busy(False)
    assert time.monotonic() - begin < 0.25
    assert stand_in.settled()


def test_after_the_end_nothing_is_taken_any_more(stand_in: StandIn, mode: MaxMode) -> None:
    mode.close()
    mode.set_busy(True)
    assert mode._thread is None
    assert stand_in.calls == []


def test_what_does_not_work_is_said_once(stand_in: StandIn, mode: MaxMode) -> None:
    said: list[str] = []
    mode.warn = said.append
    stand_in.plan("max", *["fail"] * 3)
    mode.set_busy(True)
    assert within(20, lambda: stand_in.state == "max")
    mode.close()
    (text,) = said
    assert "not allowed without sudo" in text
    assert "sudo thermalforge install" in text


def test_fans_that_are_not_given_back_in_time_are_named(stand_in: StandIn, mode: MaxMode) -> None:
    said: list[str] = []
    mode.warn = said.append
    mode.set_busy(True)
    assert within(20, lambda: stand_in.state == "max")
    stand_in.plan("auto", *["fail"] * 4)
    mode.close(timeout=3.0)
    (text,) = said
    assert "not given back yet (`thermalforge auto` failed" in text
    assert "`selfdraft max status`" in text
    assert stand_in.settled()


def test_without_a_watchdog_fans_are_left_alone(
    stand_in: StandIn, mode: MaxMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*command: str) -> None:
        raise FanError("as told")

    monkeypatch.setattr(max_mode.detached, "start", start)
    said: list[str] = []
    mode.warn = said.append
    mode.set_busy(True)
    assert within(20, lambda: said == ["as told"])
    assert stand_in.calls == []
    assert stand_in.claims.all() == []


# A model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return selfdraft.load()


def test_a_model_holds_the_fans_while_rows_run(stand_in: StandIn, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = MaxMode(stand_in.fans, stand_in.claims, "test", linger=0.1)
    monkeypatch.setattr(llm, "max_mode", None)
    monkeypatch.setattr(llm.engine, "on_rows", None)
    llm.hold_fans(mode)
    assert llm.mode == llm.describe()["mode"] == "max"
    stream = llm.stream("Hello", SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    next(stream)
    assert within(20, lambda: stand_in.state == "max")
    stream.close()
    assert stand_in.settled()
    llm.generate("Hello", SHORT)
    assert within(20, lambda: stand_in.calls.count("max") == 2)
    assert stand_in.settled()
    mode.close()


def test_the_engine_is_sustained_and_the_text_the_same(stand_in: StandIn, llm: LLM) -> None:
    held = selfdraft.load(settings=load_settings(mode="max"))
    assert (held.mode, held.engine.mode, held.notes) == ("max", "sustained", [])
    assert held.max_mode is not None
    assert held.generate("Hello", SHORT).token_ids == llm.generate("Hello", SHORT).token_ids
    held.max_mode.close()
    assert stand_in.settled()


def test_asked_for_where_it_cannot_be_had_it_is_refused(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(mode="max").engine_mode == "sustained"
    monkeypatch.setattr(thermalforge, "_on_macos", lambda: False)
    with pytest.raises(InvalidRequest, match=r"'max' cannot be had here: fans are held by ThermalForge") as refused:
        load_settings(mode="max")
    assert refused.value.param == "mode"


@pytest.mark.parametrize("reason", ["no mac", "no fans"])
def test_stored_where_it_cannot_be_had_it_is_sustained_and_said_so(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "no mac":
        monkeypatch.setattr(thermalforge, "_on_macos", lambda: False)
    else:
        stand_in.plan("status", "garbage")
    monkeypatch.setenv("SELFDRAFT_MODE", "max")
    llm = selfdraft.load()
    assert (llm.mode, llm.engine.mode, llm.max_mode) == ("sustained", "sustained", None)
    (note,) = llm.notes
    assert note.startswith("the mode max is sustained here: ")
    llm.generate("Hello", SHORT)
    assert stand_in.calls == []
