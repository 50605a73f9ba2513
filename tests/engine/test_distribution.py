"""Guards claim 1 of the design end to end: the engine's own cycles sample what its own depth 0 samples.

Two-sample chi-square over joints of consecutive tokens, at least 20,000 tokens a side and setting, depths 1 to 5 mixed
in every batch, half of the rows by each rejection rule. All rows share one prompt and first token, so that each
is an independent sample of the same law. Neither trunk nor head has an attention layer, which keeps this in seconds;
keys and values under acceptance are guarded by test_parity and, for the head, by test_head_history.

"Unseeded" streams come from a counter, so a run is deterministic: no false alarms while the noise and the model stay as
they are. Should they change, each of the 15 p-values of a setting falls below 1e-4 with odds of 1 in 10,000: one false
alarm in 170 such changes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from selfdraft.engine import RULES, Engine, Row, noise
from tests.support.chi_square import two_samples
from tests.support.nano import well_drafted_model
from tests.support.rows import finish, fork_rows, params

PROMPT, FIRST = [1, 2], 3
TOKENS = 6  # of a row, the shared first one left out: the shortest that lets depth 5 run
ROWS = 3360
BATCH = 560
DEPTHS = [1, 2, 3, 4, 5]
SIGNIFICANCE = 1e-4

SETTINGS: dict[str, dict[str, Any]] = {
    "T 0.6, top_p 0.95, top_k 6": {"temperature": 0.6, "top_p": 0.95, "top_k": 6},
    "T 1": {"temperature": 1.0},
    "min_p 0.1": {"temperature": 1.2, "min_p": 0.1},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
    },
}


@pytest.fixture(scope="module")
def model() -> Any:
    return well_drafted_model(sharpness=1.2)


@pytest.fixture(autouse=True)
def counted_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh streams of unseeded rows: a hash of a counter in place of the system's randomness."""
    counter = itertools.count()

    def urandom(size: int) -> bytes:
        return hashlib.blake2b(str(next(counter)).encode(), digest_size=size).digest()

    monkeypatch.setattr(noise, "os", SimpleNamespace(urandom=urandom))


def sample(model: Any, setting: dict[str, Any], depths: Sequence[int], rows: int, rule: str) -> list[Row]:
    """Rows that ran to their end, depths in turn."""
    done: list[Row] = []
    asked = [params(depth=depth, max_tokens=TOKENS + 1, **setting) for depth in depths]
    while len(done) < rows:
        engine = Engine(model, rule=RULES[rule])
        done += fork_rows(engine, PROMPT, FIRST, (asked * BATCH)[:BATCH])
        finish(engine)
    return done


def joint(rows: Sequence[Row], start: int, stop: int) -> Counter[tuple[int, ...]]:
    """Counts of the tokens start..stop-1 behind the shared first one."""
    return Counter(tuple(row.emitted[1 + start : 1 + stop]) for row in rows)


def acceptance(rows: Sequence[Row], position: int) -> float:
    tried = sum(sum(row.statistics.tried[position : position + 1]) for row in rows)
    return sum(sum(row.statistics.accepted[position : position + 1]) for row in rows) / tried


@pytest.mark.parametrize("name", SETTINGS)
def test_every_depth_samples_what_depth_zero_samples(model: Any, name: str) -> None:
    setting = SETTINGS[name]
    plain = sample(model, setting, [0], ROWS, "block")
    by_rule = {rule: sample(model, setting, DEPTHS, ROWS // 2, rule) for rule in RULES}
    drafted = [row for rows in by_rule.values() for row in rows]
    for side in (plain, drafted):
        assert sum(len(row.emitted) - 1 for row in side) >= 20_000
        assert all(len(row.emitted) == TOKENS + 1 for row in side)
    # Sampling is put to the test: drafts are kept and rejected at every position, and the law is no single token.
    for rows in by_rule.values():
        for position in range(5):
            assert 0.2 < acceptance(rows, position) < 0.97
    assert len(joint(plain, 0, 3)) > 50

    found = {
        f"tokens {a + 1} to {b}": p_value(drafted, plain, a, b) for a, b in ((0, 2), (1, 4), (3, 5), (4, 6), (0, 4))
    }
    found["first and last"] = compare(drafted, plain, lambda row: (row.emitted[1], row.emitted[-1]))
    for rule, rows in by_rule.items():
        found[rule] = p_value(rows, plain, 0, 3)
        found[f"{rule}, end"] = p_value(rows, plain, 3, 6)
    for depth in DEPTHS:
        mine = [row for row in drafted if row.params.depth == depth]
        found[f"depth {depth}"] = p_value(mine, plain, 0, 3)
    assert min(found.values()) > SIGNIFICANCE, found


def p_value(a: Sequence[Row], b: Sequence[Row], start: int, stop: int) -> float:
    return two_samples(joint(a, start, stop), joint(b, start, stop))


def compare(a: Sequence[Row], b: Sequence[Row], key: Callable[[Row], tuple[int, ...]]) -> float:
    return two_samples(Counter(map(key, a)), Counter(map(key, b)))


def test_the_check_sees_another_law(model: Any) -> None:
    """Depth 0 at another temperature must fail it: the check is not blind."""
    rows = ROWS // 2
    plain = sample(model, {"temperature": 1.0}, [0], rows, "block")
    other = sample(model, {"temperature": 1.3}, [0], rows, "block")
    assert p_value(other, plain, 0, 2) < SIGNIFICANCE
    found = p_value(plain[: rows // 2], plain[rows // 2 :], 0, 2)
    assert found > SIGNIFICANCE
