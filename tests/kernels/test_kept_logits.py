"""Guards what temperature, top-k, top-p and min-p keep: its value, that ties count in full, that flaws of logits are
told, and that a row's result hangs on nothing but its own numbers.

The text that GPUs run is run on the host, with threadgroups of 128 threads and slices of 512 numbers in most tests:
emulated threads are slow. What is kept must be equal; only where a mass is within 1e-5 of top_p nothing is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from selfdraft.kernels import kept_logits as subject
from selfdraft.kernels.kept_logits import MOST, Rules, fits, kept_logits, kept_logits_reference
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


def rules(ks: Sequence[int], ps: Sequence[float], temperature: float = 1.0, min_p: float = 0.0) -> Rules:
    return Rules((temperature,) * len(ks), tuple(ks), tuple(ps), (min_p,) * len(ks))


def least(z: mx.array, ks: Sequence[int], ps: Sequence[float]) -> Floats:
    """The least number that the kernel keeps at every position, [B, P]."""
    return np.where(np.isneginf(kept := np.array(kept_logits(z, rules(ks, ps))[0])), np.inf, kept).min(axis=-1)


def check(
    kept: Callable[[mx.array, Rules], tuple[mx.array, mx.array]], z: Floats, ks: list[int], ps: list[float]
) -> None:
    """What is kept of z [B, P, V], and its flaws, against fp64."""
    found, flaws = kept(mx.array(z.astype(np.float32)), rules(ks, ps))
    assert (found.shape, found.dtype, flaws.dtype) == (z.shape, mx.float32, mx.int32)
    got, compared = np.array(found), 0
    assert np.array_equal(np.array(flaws), np.isneginf(z).any(axis=-1))
    for b, p in np.ndindex(z.shape[:2]):
        own = z[b, p].astype(np.float32)
        expected, hangs = exact(own.astype(np.float64), ks[b], ps[b])
        compared += not hangs
        assert hangs or np.array_equal(got[b, p], np.where(own >= expected, own, -np.inf)), (b, p, ks[b], ps[b])
    assert compared > 0.9 * got[..., 0].size


KS = [1, 2, 20, 20, 127, 128]
PS = [0.5, 1.0, 0.95, 0.3, 0.02, 0.6]


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_all_kinds_of_rows() -> None:
    check(kept_logits, np.stack([np.stack(list(rows(seed=seed).values())) for seed in range(len(KS))]), KS, PS)


def test_the_reference_on_the_same_rows() -> None:
    z = np.stack([np.stack(list(rows(seed=seed).values())) for seed in range(len(KS))])
    check(kept_logits_reference, z, KS, PS)


@needs_compiler
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("size", [1, 7, 300, 512])
def test_a_vocabulary_that_fills_no_slice(size: int) -> None:
    ks = [1, min(size, 5), min(size, MOST)]
    check(kept_logits, np.stack([np.stack(list(rows(size, 3).values()))] * 3), ks, [0.7, 1.0, 0.9])


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_more_than_there_are_keeps_all() -> None:
    z = mx.array([[[1.0, 0.0, -5.0, 2.0]]])
    assert mx.array_equal(kept_logits(z, rules([9], [1.0]))[0], z)


@needs_compiler
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_temperature_and_min_p_as_in_plain_mlx(dtype: mx.Dtype) -> None:
    """Bit by bit, beside ranks and without them."""
    z = np.stack([np.stack(list(rows(seed=seed).values())[:5]) for seed in range(4)])
    asked = Rules((0.6, 1.0, 1.7, 0.3), (20, 0, MOST, 0), (1.0,) * 4, (0.02, 0.1, 0.0, 0.0))
    logits = mx.array(z.astype(np.float32)).astype(dtype)
    found, expected = kept_logits(logits, asked), kept_logits_reference(logits, asked)
    for one, other in zip(found, expected, strict=True):
        assert mx.array_equal(one, other)
    counts = np.isfinite(np.array(found[0])).sum(axis=-1)
    assert (counts[:, 0] > 0).all()
    assert counts[1, 0] < V == counts[3, 0]


@needs_compiler
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("number", "flaw"), [(1e30, 0), (-np.inf, 1), (np.inf, 2), (np.nan, 2), (-np.nan, 2)])
def test_a_flaw_is_told_wherever_it_stands(number: float, flaw: int) -> None:
    """Of what is given, not of what the temperature makes of it; and no other position is told of it."""
    z = np.random.default_rng(3).standard_normal((1, 4, V)).astype(np.float32)
    for position, at in enumerate((0, 431, V - 1)):
        z[0, position, at] = number
    asked = rules([20], [0.9], temperature=1e-9)
    for kept in (kept_logits, kept_logits_reference):
        assert np.array(kept(mx.array(z), asked)[1]).tolist() == [[flaw, flaw, flaw, 0]]


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_ties_that_no_list_holds_count_as_mass() -> None:
    """Ten numbers hold a fifth of the mass, 1,600 equal ones the rest; of the ten the first nine hold 18%."""
    z = np.full((1, 1, V), -30.0)
    z[..., 10:1610] = 0
    z[..., :10] = np.log(40) + np.arange(10) / 1e4
    for k in (11, MOST):
        for p, expected in ((0.17, z[0, 0, 1]), (0.19, z[0, 0, 0]), (0.21, 0.0)):
            assert least(mx.array(z.astype(np.float32)), [k], [p]).item() == np.float32(expected), (k, p)


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_a_row_hangs_on_its_own_numbers_alone() -> None:
    """Equal beside others and alone, and wherever in the vocabulary its numbers stand."""
    z = np.stack([np.stack(list(rows(seed=seed).values())[:4]) for seed in range(3)]).astype(np.float32)
    ks, ps = [20, 128, 40], [0.9, 0.5, 1.0]
    together = np.array(kept_logits(mx.array(z), rules(ks, ps))[0])
    for b, p in ((0, 3), (1, 1), (2, 0)):
        alone, _ = kept_logits(mx.array(z[b : b + 1, p : p + 1]), rules(ks[b : b + 1], ps[b : b + 1]))
        assert np.array_equal(np.array(alone), together[b : b + 1, p : p + 1])
    order = np.random.default_rng(5).permutation(V)
    assert np.array_equal(np.array(kept_logits(mx.array(z[..., order]), rules(ks, ps))[0]), together[..., order])


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_the_mass_does_not_hang_on_places() -> None:
    """Shares between two masses that differ by rounding only: an order of summing by place would tell them apart."""
    random = np.random.default_rng(8)
    z = random.standard_normal((1, 1, V)).astype(np.float32)
    best = np.sort(z[0, 0].astype(np.float64))[::-1]
    weights = np.exp(best - best[0])
    before = (np.cumsum(weights) - weights)[1:17] / weights[:MOST].sum()
    shares = before.astype(np.float32).tolist()
    order = random.permutation(V)
    here, there = (least(mx.array(np.repeat(x, 16, axis=0)), [MOST] * 16, shares) for x in (z, z[..., order]))
    assert np.array_equal(here, there)


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_nan_harms_no_other_row() -> None:
    z = np.stack([np.stack(list(rows(seed=seed).values())[:3]) for seed in range(2)]).astype(np.float32)
    healthy = np.array(kept_logits(mx.array(z), rules([20, 128], [0.9, 0.5]))[0])
    z[0, 0], z[0, 1, ::3], z[1, 2, 5] = np.nan, -np.float32(np.nan), np.nan
    found = np.array(kept_logits(mx.array(z), rules([20, 128], [0.9, 0.5]))[0])
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

    def one_more(logits: mx.array, asked: Rules) -> tuple[mx.array, mx.array]:
        return kept_logits(
            logits, Rules(asked.temperature, tuple(k + 1 for k in asked.top_k), asked.top_p, asked.min_p)
        )

    monkeypatch.setattr(subject, "kept_logits", one_more)
    assert subject._check_error(V) > 0


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_host(monkeypatch)
    assert fits(248_320)
    assert not fits(1 << 20)
    assert Rules((1.0,) * 4, (MOST, MOST + 1, 0, 0), (0.5, 0.5, 0.5, 1.0), (0.0,) * 4).served == [
        True,
        False,
        False,
        True,
    ]
    z = mx.zeros((1, 1, 8))
    for logits in (z[0], z.astype(mx.int32), z[:, :0], mx.zeros((2, 1, 8)), mx.zeros((1, 1, 1 << 20))):
        with pytest.raises(ValueError, match="kept_logits"):
            kept_logits(logits, rules([1], [0.5]))
