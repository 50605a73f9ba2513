"""Guards the cycle's book-keeping against heads that are always right, always wrong, or right in a pattern.

Whatever the head says, the output is what plain decoding emits, the trunk runs once a cycle (counted from outside, by a
model that counts), and the head's committed history holds the true pairs and nothing else. A head whose history was
reset, or whose entries were cut one too short after a full acceptance, drafts worse and stays exact: only the entries
themselves show it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.engine import RULES, Engine, Request, Row
from selfdraft.engine.batch import Batch
from selfdraft.engine.cycle import Cycle, Drafts
from tests.support.nano import nano_model
from tests.support.rows import finish, params, solo
from tests.support.scripted import ScriptedHead

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
TOKENS = 25
CHUNK = 4

depths = pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])


@pytest.fixture(scope="module")
def inner() -> Any:
    return nano_model(sharpness=3.0)


@pytest.fixture(scope="module")
def text(inner: Any) -> list[int]:
    """Plain greedy decoding."""
    return solo(inner, _request(0), prefill_chunk=CHUNK).emitted


def _request(depth: Any, **given: Any) -> Request:
    return Request(PROMPT, params(depth=depth, max_tokens=TOKENS, **{"temperature": 0.0, **given}))


def decode(inner: Any, text: list[int], asked: Request, right: Callable[[int], bool]) -> tuple[Row, ScriptedHead]:
    model = ScriptedHead(inner)
    engine = Engine(model, prefill_chunk=CHUNK)
    row = engine.add(asked)
    model.follow(row, text, right)
    finish(engine)
    return row, model


def check_counts(row: Row, model: ScriptedHead) -> None:
    """The identities that hold whatever was accepted."""
    timings = row.statistics.timings()
    chunks = -(-(len(PROMPT) - 1) // CHUNK) + 1
    assert row.statistics.prefill_chunks == chunks
    assert timings.trunk_replays == 0
    assert len(model.forwards) == timings.trunk_forwards == timings.cycles + chunks
    assert sum(timings.emitted.values()) == len(row.emitted)
    assert timings.emitted["prefill"] == 1
    assert timings.emitted["correction"] + timings.emitted["bonus"] + timings.emitted["plain"] == timings.cycles
    assert timings.emitted["draft"] == sum(timings.drafts_accepted)
    assert row.state.length == len(PROMPT) + len(row.emitted) - 1


@depths
def test_always_right(inner: Any, text: list[int], depth: int) -> None:
    row, model = decode(inner, text, _request(depth), lambda index: True)
    assert row.emitted == text
    check_counts(row, model)
    cycles, rest = divmod(TOKENS - 1, depth + 1)
    timings = row.statistics.timings()
    assert timings.cycles == cycles + (rest > 0)
    assert timings.emitted["correction"] == 0
    assert timings.emitted["bonus"] == cycles + (rest > 1)
    assert timings.emitted["plain"] == (rest == 1)
    assert timings.acceptance_per_position == [1.0] * depth
    # All cycles but the last are full: one forward of depth + 1 tokens yields depth + 1 tokens.
    assert [width for _, width in model.forwards[-timings.cycles :]] == [depth + 1] * cycles + [rest] * (rest > 0)


@depths
def test_always_wrong(inner: Any, text: list[int], depth: int) -> None:
    row, model = decode(inner, text, _request(depth), lambda index: False)
    assert row.emitted == text
    check_counts(row, model)
    timings = row.statistics.timings()
    assert timings.cycles == TOKENS - 1
    assert timings.emitted["draft"] == timings.emitted["bonus"] == 0
    assert timings.emitted["plain"] == 1  # the last token leaves nothing to draft for
    assert timings.drafts_accepted == [0] * len(timings.drafts_accepted)
    assert timings.drafts_tried == [TOKENS - 2] + [0] * (len(timings.drafts_tried) - 1)


@depths
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_right_in_a_pattern(inner: Any, text: list[int], depth: int, seed: int) -> None:
    pattern = [random.Random(100 * seed + i).random() < 0.75 for i in range(TOKENS)]
    row, model = decode(inner, text, _request(depth), lambda index: pattern[index])
    assert row.emitted == text
    check_counts(row, model)
    # Play the cycles by hand.
    done, cycles, tried, accepted = 1, 0, [0] * depth, [0] * depth
    while done < TOKENS:
        k = min(depth, TOKENS - done - 1)
        n = next((i for i in range(k) if not pattern[done + i]), k)
        for i in range(k):
            tried[i] += i <= n
            accepted[i] += i < n
        done += n + 1
        cycles += 1
    timings = row.statistics.timings()
    assert (timings.cycles, timings.drafts_tried, timings.drafts_accepted) == (cycles, tried, accepted)


@pytest.mark.parametrize("rule_setting", [{"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "top_k": 4, "seed": 6}])
def test_sampled_text_is_followed_too(inner: Any, rule_setting: dict[str, Any]) -> None:
    plain = solo(inner, _request(0, **rule_setting), prefill_chunk=CHUNK).emitted
    row, model = decode(inner, plain, _request(3, **rule_setting), lambda index: True)
    assert row.emitted == plain
    check_counts(row, model)
    assert row.statistics.timings().cycles == (TOKENS - 1) // 4


@pytest.mark.parametrize("right", [True, False])
def test_unseeded_rows_survive_a_certain_head(inner: Any, right: bool) -> None:
    """Rejection against one-hot q: a wrong certainty is rejected unless p allows it, and never loops or repeats."""
    row, model = decode(inner, [0] * TOKENS, _request(4, temperature=1.0), lambda index: right)
    assert len(row.emitted) == TOKENS
    check_counts(row, model)


def history_error(inner: Any, row: Row) -> float:
    """Largest difference between a row's head history and a head pass from scratch over its true pairs."""
    tokens = [*PROMPT, *row.emitted]
    trunk = inner.new_state()
    hidden, _ = inner.forward(mx.array([tokens[:-1]]), [trunk], keep_steps=True)
    scratch = inner.new_state()
    inner.draft(mx.array([tokens[1:]]), hidden, [scratch], [0])
    held = row.state.head_length
    assert held <= len(tokens) - 1
    return max(
        float(np.abs(np.array(getattr(ours, name)[:, :, :held] - getattr(true, name)[:, :, :held])).max())
        for ours, true in zip(row.state.head, scratch.head, strict=True)
        for name in ("keys", "values")
    )


@pytest.mark.parametrize("depth", [1, 2, 3, 5, "auto"])
def test_head_history_holds_true_pairs(inner: Any, text: list[int], depth: Any) -> None:
    """Checked in every gap between cycles, under rejections and full acceptances in random order."""
    model = ScriptedHead(inner)
    engine = Engine(model, prefill_chunk=CHUNK)
    row = engine.add(_request(depth))
    model.follow(row, text, lambda index: random.Random(index).random() < 0.8)
    while engine.rows:
        engine.step()
        if row.emitted:
            waiting = len(row.pending.tokens) if row.pending else 0
            if not row.done:
                assert row.state.head_length + waiting == len(PROMPT) + len(row.emitted) - 1
            assert history_error(inner, row) < 1e-4
    assert row.emitted == text
    if depth not in (1, "auto"):
        assert {"bonus", "correction"} <= {kind for kind, count in row.statistics.emitted.items() if count}


class Recording(Cycle):
    """Keeps what each cycle drafted, with what had been emitted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[list[int], list[int]]] = []

    def draft(self, batch: Batch) -> Drafts:
        drafts = super().draft(batch)
        tokens: list[list[int]] = np.array(drafts.tokens).tolist()
        self.seen += [(list(row.emitted), tokens[i][: batch.depths[i]]) for i, row in enumerate(batch.rows)]
        return drafts


def chain(inner: Any, tokens: Sequence[int], depth: int) -> list[int]:
    """Greedy drafts behind `tokens`, by a head pass from scratch over all true pairs and then on its own output."""
    hidden, _ = inner.forward(mx.array([tokens[:-1]]), [inner.new_state()], keep_steps=True)
    state = inner.new_state()
    out = inner.draft(mx.array([tokens[1:]]), hidden, [state], [0])[:, -1:]
    drafts: list[int] = []
    while len(drafts) < depth:
        drafts.append(np.array(inner.logits(out)).argmax().item())
        out = inner.draft(mx.array([drafts[-1:]]), out, [state], [len(tokens) - 2 + len(drafts)])
    return drafts


def test_drafts_are_the_heads_chain_on_true_history(inner: Any) -> None:
    """Every draft sees the one before it, at the position behind it, on a history of true pairs."""
    cycle = Recording(inner, RULES["block"])
    engine = Engine(inner, prefill_chunk=CHUNK, cycle=cycle)
    for depth in (1, 3, 4):
        engine.add(_request(depth))
    finish(engine)
    drafted = [(emitted, drafts) for emitted, drafts in cycle.seen if drafts]
    assert len(drafted) > 40
    for emitted, drafts in drafted[::3]:
        assert drafts == chain(inner, [*PROMPT, *emitted], len(drafts))


def test_a_resting_row_catches_up(inner: Any, text: list[int]) -> None:
    """A row that may draft but rests at depth 0 for a while gives its head all the pairs it missed."""

    class Resting:
        def choose(self, rows: int) -> int:
            return 0 if len(row.emitted) < 10 else 3

        def observe(self, tried: int, accepted: int) -> None:
            pass

    model = ScriptedHead(inner)
    engine = Engine(model, prefill_chunk=CHUNK)
    row = engine.add(_request(3))
    row.policy = Resting()
    model.follow(row, text)
    finish(engine)
    assert row.emitted == text
    check_counts(row, model)
    assert row.state.head_length > len(PROMPT) + 10
    assert history_error(inner, row) < 1e-4


def test_a_long_rest_does_not_pile_up(inner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfdraft.engine.cycle.HISTORY_BACKLOG", 4)

    class Resting:
        def choose(self, rows: int) -> int:
            return 0

        def observe(self, tried: int, accepted: int) -> None:
            pass

    engine = Engine(inner, prefill_chunk=CHUNK)
    row = engine.add(_request(3))
    row.policy = Resting()
    while engine.rows:
        engine.step()
        assert row.pending is None or len(row.pending.tokens) <= 4
    assert history_error(inner, row) < 1e-4
    assert row.state.head_length >= len(PROMPT) + TOKENS - 1 - 5


def right_for(share: float, depth: int) -> Callable[[int], bool]:
    return lambda index: random.Random(10 * index + depth).random() < share


def test_rows_beside_each_other_commit_their_own_counts(inner: Any, text: list[int]) -> None:
    """One batch: right, wrong and mixed heads at depths 0 to 5. One forward serves all rows of a cycle."""
    model = ScriptedHead(inner)
    engine = Engine(model, prefill_chunk=CHUNK)
    rows = []
    for depth in range(6):
        for share in (0.0, 0.6, 1.0):
            row = engine.add(_request(depth))
            model.follow(row, text, right_for(share, depth))
            rows.append(row)
    finish(engine)
    for row in rows:
        assert row.emitted == text
        timings = row.statistics.timings()
        assert timings.trunk_replays == 0
        assert sum(timings.emitted.values()) == TOKENS
        assert row.state.length == len(PROMPT) + TOKENS - 1
        if row.drafts:
            assert history_error(inner, row) < 1e-4
    widths = [rows for rows, _ in model.forwards]
    assert sum(widths) == sum(row.statistics.trunk_forwards for row in rows)
    assert engine.cycle.synchronisations == len(model.forwards) - sum(row.statistics.prefill_chunks for row in rows)
