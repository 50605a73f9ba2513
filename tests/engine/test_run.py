"""Guards how callers follow a row: every token once, in order, while others step too; and the line a row leaves."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from selfdraft.engine import Engine, Request
from selfdraft.params import SamplingParams
from tests.support.nano import SMALLER, nano_model
from tests.support.rows import finish, request, solo
from tests.support.scripted import ScriptedHead

TOKENS = 10


@pytest.fixture(scope="module")
def model() -> Any:
    return nano_model(sharpness=3.0, **SMALLER)


def test_run_yields_every_token_once_and_nothing_during_prefill(model: Any) -> None:
    engine = Engine(model, prefill_chunk=4)
    row = engine.add(request(list(range(10)), depth=2, max_tokens=TOKENS, temperature=0.0))
    pieces, prefilled = [], []
    for piece in engine.run(row):
        pieces.append(piece)
        prefilled.append(row.prefilled)
    assert prefilled[:4] == [4, 8, 9, 10]
    assert pieces[:3] == [[], [], []]
    assert [token for piece in pieces for token in piece] == row.emitted
    assert all(pieces[3:])


def test_rows_run_side_by_side(model: Any) -> None:
    """Readers in turn: each step advances all rows, and no reader misses what another's step emitted.

    Tokens that came while a reader waited at its yield were once lost to it.
    """
    asked = [request([n, 3], depth=n, max_tokens=TOKENS - n, temperature=0.0) for n in range(3)]
    engine = Engine(model)
    rows = [engine.add(one) for one in asked]
    readers = {index: engine.run(row) for index, row in enumerate(rows)}
    heard: dict[int, list[int]] = {index: [] for index in readers}
    while readers:
        for index, reader in list(readers.items()):
            piece = next(reader, None)
            if piece is None:
                del readers[index]
            else:
                heard[index] += piece
    for index, one in enumerate(asked):
        assert heard[index] == rows[index].emitted == solo(model, one).emitted


def test_a_row_that_ended_elsewhere_is_still_read_to_its_end(model: Any) -> None:
    engine = Engine(model)
    row = engine.add(request([5], depth=0, max_tokens=TOKENS, temperature=0.0))
    finish(engine)
    assert list(engine.run(row)) == [row.emitted]
    assert list(engine.run(row)) == [row.emitted]  # a reader of its own


def test_prefill_and_cycles_take_turns(model: Any) -> None:
    """A long prompt that joins does not stop a row that runs."""
    counted = ScriptedHead(model)
    engine = Engine(counted, prefill_chunk=2)
    running = engine.add(request([1], depth=0, max_tokens=TOKENS, temperature=0.0))
    engine.step()
    engine.add(request([1] * 13, depth=0, max_tokens=2, temperature=0.0))
    grown = []
    while not running.done:
        before = len(running.emitted)
        engine.step()
        grown.append(len(running.emitted) > before)
    assert grown[:12] == [False, True] * 6 or grown[:12] == [True, False] * 6


def test_each_row_leaves_one_line(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="selfdraft.engine.engine")
    engine = Engine(model)
    for depth in (0, 2):
        row = engine.add(request([1, 2, 3], depth=depth, max_tokens=TOKENS, temperature=0.0))
        caplog.clear()
        finish(engine)
        (record,) = caplog.records
        line = record.getMessage()
        kinds = {kind: int(count) for kind, count in re.findall(r"(prefill|draft|correction|bonus|plain)=(\d+)", line)}
        assert kinds == {kind: count for kind, count in row.statistics.emitted.items() if count}
        assert f"prompt_tokens=3 restored_tokens=0 emitted_tokens={TOKENS} cycles={row.statistics.cycles} " in line
        # The rope position of the newest token is counted in tokens; cycles would fall behind.
        assert f"rope_position_of_last={3 + TOKENS - 1} " in line
        assert "finish=length" in line


def test_a_step_that_breaks_off_ends_its_rows_and_no_others() -> None:
    """Ctrl-C or a failed allocation inside a cycle leaves its rows half moved; they must end, saying so."""
    model = nano_model()
    engine = Engine(model)
    params = SamplingParams(depth=2, max_tokens=30, temperature=0).resolved({})
    running = [engine.add(Request([1, 2, 3], params)) for _ in range(2)]
    while not all(row.emitted for row in running):
        engine.step()
    forward = model.forward

    def broken(*args: object, **kwargs: object) -> object:
        raise KeyboardInterrupt

    model.forward = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    model.forward = forward  # type: ignore[method-assign]
    assert all(row.done and "KeyboardInterrupt" in str(row.error) for row in running)
    assert engine.rows == []
    late = engine.add(Request([1, 2, 3], params))
    for _ in engine.run(late):
        pass
    assert len(late.emitted) == 30
