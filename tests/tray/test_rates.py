"""Guards the live figures: they are of the last seconds of decoding, and survive whatever a server's counters do."""

from __future__ import annotations

import pytest

from selfdraft.server.metrics import Metrics
from selfdraft.tray.rates import Counts, Rates, counts


def test_counts_are_read_as_the_server_writes_them() -> None:
    metrics = Metrics()
    metrics.completion_tokens.labels("reference").inc(40)
    metrics.draft_tokens.labels("reference").inc(30)
    metrics.accepted_tokens.labels("reference").inc(21)
    metrics.accepted_per_position.labels("reference", "0").inc(21)  # a name that begins alike
    assert counts(metrics.text().decode()) == Counts(40, 30, 21)


def test_series_of_several_models_add_up() -> None:
    text = 'selfdraft_generation_tokens_total{model="a b"} 3.0\nselfdraft_generation_tokens_total{model="c"} 4.0\n'
    assert counts(text).tokens == 7
    assert counts("") == Counts()


def test_the_speed_is_that_of_the_last_seconds() -> None:
    rates = Rates(seconds=8)
    assert rates.speed is None
    for second in range(20):
        tokens = 10 * second if second < 10 else 100 + 50 * (second - 10)
        rates.add(second, Counts(tokens, 2 * tokens, tokens))
    assert rates.speed == pytest.approx(50)
    assert rates.acceptance == pytest.approx(0.5)


def test_idle_time_does_not_count() -> None:
    rates = Rates()
    for now, tokens in ((0, 0), (1, 40), (2, 80), (3, 80), (60, 80), (61, 120)):
        rates.add(now, Counts(tokens))
        if now == 60:
            assert rates.speed == pytest.approx(40)  # the last ones stay
    assert rates.speed == pytest.approx(40)
    assert rates.acceptance is None


def test_a_server_that_began_anew_has_no_speed_below_zero() -> None:
    rates = Rates()
    rates.add(0, Counts(500, 10, 5))
    rates.add(1, Counts(540, 20, 10))
    rates.add(2, Counts(3, 0, 0))
    assert rates.speed is None
    rates.add(3, Counts(33, 0, 0))
    assert rates.speed == pytest.approx(30)
