"""Rows for engine tests: resolved parameters, solo runs, and many rows that share one prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfdraft.engine import Engine, Request, Row
from selfdraft.engine import cycle as cycles
from selfdraft.engine.row import Pending, TextStop
from selfdraft.models.base import Model
from selfdraft.params import SamplingParams

__all__ = ["finish", "fork_rows", "params", "prefill_all", "request", "solo"]


def params(**given: Any) -> SamplingParams:
    """Parameters with our own fallbacks in place of a checkpoint's defaults."""
    return SamplingParams(**given).resolved({})


def request(
    prompt: Sequence[int],
    *,
    stop_ids: frozenset[int] = frozenset(),
    choice: int = 0,
    text_stop: TextStop | None = None,
    **given: Any,
) -> Request:
    """A request whose parameters are given by name."""
    return Request(prompt, params(**given), stop_ids=stop_ids, choice=choice, text_stop=text_stop)


def finish(engine: Engine) -> None:
    """Step until no row is left."""
    while engine.rows:
        engine.step()


def prefill_all(engine: Engine) -> None:
    """Forward the prompts of all rows before any cycle runs, so that they start together."""
    while engine._joining:
        engine._prefill_is_next = True
        engine.step()


def solo(model: Model, asked: Request, *, prefill_chunk: int = 4096) -> Row:
    """A request decoded alone in an engine of its own."""
    engine = Engine(model, prefill_chunk=prefill_chunk)
    row = engine.add(asked)
    finish(engine)
    return row


def fork_rows(engine: Engine, prompt: Sequence[int], first: int | None, asked: Sequence[SamplingParams]) -> list[Row]:
    """Rows that run in `engine` as if each had forwarded `prompt` and emitted `first`, for one prefill in all.

    The emitted tokens of a row then follow the law given `first`; None is the most likely token.
    """
    opened = engine.add(Request(prompt, params(depth=engine.model.max_depth, max_tokens=8, temperature=0.0)))
    engine._joining.remove(opened)
    while not engine._prefill.advance(opened):
        pass
    assert opened.pending is not None
    first = opened.emitted[0] if first is None else first
    rows = []
    for one in asked:
        row = engine.add(Request(prompt, one))
        engine._joining.remove(row)
        row.state = opened.state.fork()
        row.draws = 1  # as the prefill leaves it
        row.statistics.prefill_chunks = row.statistics.trunk_forwards = opened.statistics.prefill_chunks
        row.statistics.emitted["prefill"] = 1
        cycles.emit(row, [first])
        if row.drafts:
            row.pending = Pending(opened.pending.hidden, [*opened.pending.tokens[:-1], first])
        rows.append(row)
    engine._running += rows
    return rows
