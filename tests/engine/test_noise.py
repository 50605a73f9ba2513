"""Guards the address of every random number: (seed, choice, emitted index, token), and nothing else.

If noise depended on the batch or on how much was drawn at once, seeded text would depend on depth; if addresses
collided, draws that must be independent would not be. Streams are fixed, so a run is deterministic; with other noise
each of the 5 distribution checks would fail with odds of 1 in 10,000.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats  # type: ignore[import-untyped]

from selfdraft.engine import Engine, noise
from tests.support.nano import SMALLER, nano_model
from tests.support.rows import prefill_all, request

V = 24
SIGNIFICANCE = 1e-4


def keys(streams: Sequence[noise.Stream], counters: Sequence[int], count: int) -> mx.array:
    return noise.addresses(streams, counters, count - 1)[0]


def gumbel(seed: int, choice: int, index: int) -> list[float]:
    """Noise of one position, drawn alone."""
    drawn: list[float] = np.array(noise.gumbel(keys([noise.stream(seed, choice)], [index], 1), V))[0, 0].tolist()
    return drawn


def many(count: int) -> npt.NDArray[np.float32]:
    return np.array(noise.gumbel(keys([noise.stream(5, 0), noise.stream(6, 0)], [0, 0], count), V))


def test_same_address_same_value_whatever_the_batch_or_count() -> None:
    alone = {(seed, index): gumbel(seed, 0, index) for seed in (1, 2, 3) for index in range(3, 9)}
    streams = [noise.stream(seed, 0) for seed in (3, 1, 2)]
    starts = [3, 5, 4]
    batch = np.array(noise.gumbel(keys(streams, starts, 4), V)).tolist()
    for row, (seed, start) in enumerate(zip((3, 1, 2), starts, strict=True)):
        for i in range(4):
            assert batch[row][i] == alone[seed, start + i]


def test_other_seeds_choices_and_indexes_differ() -> None:
    addresses = [(seed, choice, index) for seed in (0, 1, -1) for choice in (0, 1) for index in range(20)]
    values = {tuple(gumbel(*address)) for address in addresses}
    assert len(values) == len(addresses)


@pytest.mark.parametrize("pair", [(2**64 - 1, -1), (2**63, -(2**63)), (2**32, 0), (1, 2**32 + 1), (11, 1)])
def test_wide_and_negative_seeds_are_seeds_of_their_own(pair: tuple[int, int]) -> None:
    """No seed is folded onto another by a cut to 32 or 64 bits."""
    first, second = (gumbel(seed, 0, 0) for seed in pair)
    assert first != second
    assert all(np.isfinite(first + second))


def test_seed_and_choice_do_not_run_together() -> None:
    assert noise.stream(1, 11) != noise.stream(11, 1) != noise.stream(111, 0)


def test_unseeded_streams_are_fresh() -> None:
    assert len({noise.stream(None, 0) for _ in range(20)}) == 20


def test_counters_wrap_at_32_bits_without_an_error() -> None:
    """A stream's low word may be close to 2^32, and the index is added to it."""
    high = noise.gumbel(keys([(7, 2**32 - 2)], [0], 4), V)
    low = noise.gumbel(keys([(7, 0)], [0], 2), V)
    assert mx.array_equal(high[:, 2:], low)


def test_noise_is_standard_gumbel_and_uniform() -> None:
    values = many(2000)
    assert stats.kstest(values.ravel(), stats.gumbel_r.cdf).pvalue > SIGNIFICANCE
    streams = [noise.stream(seed, 0) for seed in range(20_000)]
    uniforms = np.array(noise.addresses(streams, [3] * len(streams), 3)[1])
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    assert stats.kstest(uniforms.ravel(), stats.uniform.cdf).pvalue > SIGNIFICANCE


def test_argmax_of_logits_plus_noise_samples_the_softmax() -> None:
    logits = np.linspace(-2, 1, V, dtype=np.float32)
    law = np.exp(logits.astype(np.float64))
    law /= law.sum()
    chosen = (many(5000) + logits).argmax(axis=-1).ravel()
    counts = np.bincount(chosen, minlength=V)
    assert stats.chisquare(counts, law * chosen.size).pvalue > SIGNIFICANCE


def test_neighbours_are_independent() -> None:
    """Next index, next token, next stream: rank correlations of 96,000 pairs stay in 4 standard errors."""
    values = many(2000)
    for a, b in (
        (values[:, 1:], values[:, :-1]),
        (values[..., 1:], values[..., :-1]),
        (values[0], values[1]),
    ):
        found = stats.spearmanr(a.ravel(), b.ravel()).statistic
        assert abs(found) < 4 / np.sqrt(a.size)


def test_uniforms_have_addresses_of_their_own() -> None:
    """With the Gumbel keys, a uniform would be a function of the noise that drew the token it judges."""
    streams = [noise.stream(seed, 0) for seed in range(4000)]
    counters = [4] * len(streams)
    uniforms = np.array(
        noise.addresses(streams, counters, V)[1]
    )  # as many as tokens, so that equal keys give equal bits
    judged = np.exp(-np.exp(-np.array(noise.gumbel(keys(streams, counters, 1), V))[:, 0].astype(np.float64)))
    assert np.abs(uniforms - judged).max(axis=1).min() > 0.1
    assert abs(stats.spearmanr(uniforms.ravel(), judged.ravel()).statistic) < 4 / np.sqrt(uniforms.size)


def test_an_unseeded_row_never_sees_a_number_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different depths in one batch draw as many positions as the deepest; a seeded row draws by its index."""
    drawn: dict[noise.Stream, list[range]] = {}
    addresses = noise.addresses

    def recorded(
        streams: Sequence[noise.Stream], counters: Sequence[int], depth: int, shift: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        assert shift is None
        for stream, counter in zip(streams, counters, strict=True):
            drawn.setdefault(stream, []).append(range(counter, counter + depth + 1))
        return addresses(streams, counters, depth, shift)

    monkeypatch.setattr(noise, "addresses", recorded)
    engine = Engine(nano_model(sharpness=1.0, **SMALLER))
    rows = [engine.add(request([1, 2], depth=depth, max_tokens=20, temperature=1.0)) for depth in (0, 1, 2, 5)]
    seeded = engine.add(request([1, 2], depth=3, max_tokens=20, temperature=1.0, seed=9))
    prefill_all(engine)
    starts = []
    while engine.rows:
        if not seeded.done:
            starts.append(len(seeded.emitted))
        engine.step()
    for row in rows:
        positions = [position for used in drawn[row.stream] for position in used]
        assert len(positions) == len(set(positions))
        assert len(drawn[row.stream]) == 1 + row.statistics.cycles
    assert [used.start for used in drawn[seeded.stream]] == [0, *starts]


def test_no_noise_is_infinite() -> None:
    """This key's bits for token 5 are all 0: a Gumbel of -inf, with which a law of that token alone chooses another."""
    drawn = noise.gumbel(keys([(1, 48_737_070)], [0], 1), 16)
    least = np.array(drawn).min()
    assert least == drawn[0, 0, 5].item()
    assert np.isfinite(least)
    assert least < -np.log(32 * np.log(2))  # below every other uniform's
    only_5 = mx.where(mx.arange(16) == 5, 0.0, -mx.inf)
    assert mx.argmax(only_5 + drawn[0, 0]).item() == 5
