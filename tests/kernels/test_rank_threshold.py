"""Guards the least logit that top-k and top-p keep: its value, that ties count in full, and that a row's result hangs
on nothing but its own numbers.

The text that GPUs run is run on the host, with threadgroups of 128 threads and slices of 512 numbers in most tests:
emulated threads are slow. Thresholds must be equal; only where a mass is within 1e-5 of top_p nothing is asked.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from selfdraft.kernels import rank_threshold as subject
from selfdraft.kernels.rank_threshold import MOST, fits, rank_threshold, rank_threshold_reference
from tests.support.host_kernels import kernels_on_host, needs_compiler

Floats = npt.NDArray[np.float64]

CLOSE = 1e-5
V = 1700  # four slices, none of them whole


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_THREADS", 128)
    monkeypatch.setattr(subject, "_PER_THREAD", 4)
    kernels_on_host(monkeypatch)


def exact(z: Floats, k: int, p: float) -> tuple[float, bool]:
    """Threshold of a row in fp64, and whether it hangs on rounding."""
    best = np.sort(z)[::-1]
    kth = best[min(k, len(z)) - 1]
    if p >= 1 or best[0] == -np.inf:
        return kth, False
    weights = np.exp(best - best[0])
    shares = weights / weights[best >= kth].sum()
    before = np.cumsum(shares) - shares
    return max(kth, best[before < p][-1]), bool(np.any(np.abs(before - p) < CLOSE))


def rows(size: int = V, seed: int = 0) -> dict[str, Floats]:
    """Rows [size] by what is special about them."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal(size).astype(np.float32)
    holes = np.where(random.random(size) < 0.05, normal, -np.inf)
    peaked = normal.copy()
    peaked[random.integers(size)] = 30
    zeros = np.where(random.random(size) < 0.5, -0.0, 0.0)
    zeros[:: max(size // 40, 1)] = normal[:: max(size // 40, 1)]
    return {
        "random": 3 * normal,
        "tied": np.round(normal * 4) / 4,
        "hardly anything but ties": np.round(normal),
        "holes": holes,
        "peaked": peaked,
        "flat": np.full(size, -2.5),
        "nothing allowed": np.full(size, -np.inf),
        "sorted, so that one slice has it all": np.sort(normal),
        "zeros of both signs": zeros,
        "negative": normal - 60,
        "all magnitudes": np.sign(normal) * 2.0 ** random.integers(-100, 6, size),
    }


def check(
    threshold: Callable[[mx.array, mx.array, mx.array], mx.array], z: Floats, ks: list[int], ps: list[float]
) -> None:
    """Thresholds of z [B, P, V] against fp64."""
    found = threshold(mx.array(z.astype(np.float32)), mx.array(ks, mx.int32), mx.array(ps, mx.float32))
    assert (found.shape, found.dtype) == ((*z.shape[:2], 1), mx.float32)
    got, compared = np.array(found)[..., 0], 0
    for b, p in np.ndindex(z.shape[:2]):
        expected, hangs = exact(z[b, p].astype(np.float32).astype(np.float64), ks[b], ps[b])
        compared += not hangs
        assert hangs or got[b, p] == expected, (b, p, ks[b], ps[b], got[b, p], expected)
    assert compared > 0.9 * got.size


KS = [1, 2, 20, 20, 127, 128]
PS = [0.5, 1.0, 0.95, 0.3, 0.02, 0.6]


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_all_kinds_of_rows() -> None:
    check(rank_threshold, np.stack([np.stack(list(rows(seed=seed).values())) for seed in range(len(KS))]), KS, PS)


def test_the_reference_on_the_same_rows() -> None:
    z = np.stack([np.stack(list(rows(seed=seed).values())) for seed in range(len(KS))])
    check(lambda *given: rank_threshold_reference(*given, most=MOST), z, KS, PS)


@needs_compiler
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("size", [1, 7, 300, 512])
def test_a_vocabulary_that_fills_no_slice(size: int) -> None:
    ks = [1, min(size, 5), min(size, MOST)]
    check(rank_threshold, np.stack([np.stack(list(rows(size, 3).values()))] * 3), ks, [0.7, 1.0, 0.9])


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_more_than_there_are_keeps_all() -> None:
    z = mx.array([[[1.0, 0.0, -5.0, 2.0]]])
    assert np.array(rank_threshold(z, mx.array([9], mx.int32), mx.array([1.0]))).item() <= -5


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_ties_that_no_list_holds_count_as_mass() -> None:
    """Ten numbers hold a fifth of the mass, 1,600 equal ones the rest; of the ten the first nine hold 18%."""
    z = np.full((1, 1, V), -30.0)
    z[..., 10:1610] = 0
    z[..., :10] = np.log(40) + np.arange(10) / 1e4
    for k in (11, MOST):
        for p, expected in ((0.17, z[0, 0, 1]), (0.19, z[0, 0, 0]), (0.21, 0.0)):
            found = rank_threshold(mx.array(z.astype(np.float32)), mx.array([k], mx.int32), mx.array([p]))
            assert found.item() == np.float32(expected), (k, p)


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_a_row_hangs_on_its_own_numbers_alone() -> None:
    """Equal beside others and alone, and wherever in the vocabulary its numbers stand."""
    z = np.stack([np.stack(list(rows(seed=seed).values())[:4]) for seed in range(3)]).astype(np.float32)
    ks, ps = mx.array([20, 128, 40], mx.int32), mx.array([0.9, 0.5, 1.0])
    together = np.array(rank_threshold(mx.array(z), ks, ps))
    for b, p in ((0, 3), (1, 1), (2, 0)):
        alone = rank_threshold(mx.array(z[b : b + 1, p : p + 1]), ks[b : b + 1], ps[b : b + 1])
        assert np.array_equal(np.array(alone), together[b : b + 1, p : p + 1])
    moved = z[..., np.random.default_rng(5).permutation(V)]
    assert np.array_equal(np.array(rank_threshold(mx.array(moved), ks, ps)), together)


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_the_mass_does_not_hang_on_places() -> None:
    """Shares between two masses that differ by rounding only: an order of summing by place would tell them apart."""
    random = np.random.default_rng(8)
    z = random.standard_normal((1, 1, V)).astype(np.float32)
    best = np.sort(z[0, 0].astype(np.float64))[::-1]
    weights = np.exp(best - best[0])
    before = (np.cumsum(weights) - weights)[1:17] / weights[:MOST].sum()
    shares = mx.array(before.astype(np.float32))
    order = random.permutation(V)
    asked = mx.full((16,), MOST, mx.int32)
    here, there = (rank_threshold(mx.array(np.repeat(x, 16, axis=0)), asked, shares) for x in (z, z[..., order]))
    assert np.array_equal(np.array(here), np.array(there))


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_nan_harms_no_other_row() -> None:
    z = np.stack([np.stack(list(rows(seed=seed).values())[:3]) for seed in range(2)]).astype(np.float32)
    ks, ps = mx.array([20, 128], mx.int32), mx.array([0.9, 0.5])
    healthy = np.array(rank_threshold(mx.array(z), ks, ps))
    z[0, 0], z[0, 1, ::3], z[1, 2, 5] = np.nan, -np.float32(np.nan), np.nan
    found = np.array(rank_threshold(mx.array(z), ks, ps))
    for b, p in ((0, 2), (1, 0), (1, 1)):
        assert np.array_equal(found[b, p], healthy[b, p])


@needs_compiler
def test_the_check_on_whole_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device launches them."""
    kernels_on_host(monkeypatch)
    assert subject._check_error(9000) == 0


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_a_kernel_that_keeps_one_token_more_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subject._check_error(V) == 0
    monkeypatch.setattr(subject, "rank_threshold", lambda z, top_k, top_p: rank_threshold(z, top_k + 1, top_p))
    assert subject._check_error(V) > 0


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_host(monkeypatch)
    assert fits(248_320)
    assert not fits(1 << 20)
    k, p = mx.array([1], mx.int32), mx.array([0.5])
    z = mx.zeros((1, 1, 8))
    half, unsigned, two = z.astype(mx.bfloat16), k.astype(mx.uint32), mx.array([0.5] * 2)
    for given in ((z[0], k, p), (half, k, p), (z, unsigned, p), (z, k, two)):
        with pytest.raises(ValueError, match="rank_threshold"):
            rank_threshold(*given)
    with pytest.raises(ValueError, match="rank_threshold"):
        rank_threshold(mx.zeros((1, 1, 1 << 20)), k, p)
