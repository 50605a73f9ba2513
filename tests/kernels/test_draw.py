"""Guards tokens drawn on the device: the noise is MLX's, number by number, so seeded text does not hang on the kernel;
the lowest id wins; a position's token hangs on nothing else.

The text that GPUs run is run on the host, with slices of 128 ids. Logarithms of two libraries may differ in their last
bits: tokens are compared where the best is ahead by 1e-5.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from selfdraft.kernels import draw as subject
from selfdraft.kernels.draw import draw, draw_reference, fits, gumbel_reference
from selfdraft.kernels.portable import Kernel, Launch
from tests.support.host_kernels import kernels_on_host, needs_compiler, run_on_host

Floats = npt.NDArray[np.float32]

CLEAR = 1e-5
NOISY = mx.array([1, 1, 1, 1], mx.int32)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_THREADS", 64)
    monkeypatch.setattr(subject, "_PAIRS", 1)
    kernels_on_host(monkeypatch)


def keys(rows: int, positions: int, seed: int = 0) -> mx.array:
    return mx.random.split(mx.random.key(seed), rows * positions).reshape(rows, positions, 2)


def laws(size: int, seed: int = 0) -> Floats:
    """Positions [P, size]: dense, flat, tied, few allowed, one allowed."""
    random = np.random.default_rng(seed)
    normal = 2 * random.standard_normal(size)
    few = np.where(random.random(size) < 10 / size, normal, -np.inf)
    few[-1] = 0
    one = np.full(size, -np.inf)
    one[random.integers(size)] = -3
    return np.stack([normal, np.zeros(size), np.round(normal), few, one]).astype(np.float32)


def noise_of_the_kernel(size: int, key: mx.array) -> Floats:
    """Slices of 64 ids that each allow one: what they find is its noise."""
    kernel: Kernel = subject._KERNEL
    slices, found = -(-size // 64), np.full(size, np.nan, np.float32)
    launch = Launch({"JOIN": 0, "THREADS": 32, "PER": 1}, (slices, 1, 1), 32, [(1, 1, slices, 2)], [mx.float32])
    apart = -(-size // 2)
    for turn in range(64):
        ids = [at % apart + at // apart * apart for at in range(size) if at % apart % 32 + at // apart * 32 == turn]
        z = np.full(size, -np.inf, np.float32)
        z[ids] = 0
        best = np.array(run_on_host(kernel, [mx.array(z[None, None]), key[None, None], NOISY], launch)[0])[0, 0]
        for value, at in best:
            if z[int(at)] == 0:
                found[int(at)] = value
    return found


@needs_compiler
@pytest.mark.parametrize("size", [1, 2, 257, 300])
def test_noise_is_that_of_mlx(size: int) -> None:
    """Within the last bits of two logarithms: a word of another counter would be anything.

    The last key, at two ids, has a word that rounds to a uniform of 1.
    """
    for key in (mx.array(words, mx.uint32) for words in ((7, 9), (0xFFFFFFF0, 0x80000001), (5, 11_611_559))):
        expected = np.array(gumbel_reference(key[None], size)[0])
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(noise_of_the_kernel(size, key), expected, rtol=2e-6, atol=1e-6)


@needs_compiler
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("size", [1, 2, 7, 127, 300, 1001])
def test_tokens_are_those_of_mlx(size: int) -> None:
    z = np.stack([laws(size, seed) for seed in range(3)])
    own = keys(3, z.shape[1])
    drawn = draw(mx.array(z), own, NOISY)
    assert (drawn.shape, drawn.dtype) == (z.shape[:2], mx.uint32)
    found = np.array(drawn)
    noise = np.array(gumbel_reference(own.reshape(-1, 2), size)).reshape(z.shape)
    best = np.sort(z + noise, axis=-1)[..., ::-1]
    clear = best[..., 0] - best[..., 1] > CLEAR if size > 1 else np.ones(found.shape, bool)
    assert clear.mean() > 0.9
    assert np.array_equal(found[clear], np.array(draw_reference(mx.array(z), own, NOISY))[clear])


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_rows_without_noise_take_the_lowest_of_the_most_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_PAIRS", 2)
    z = np.stack([laws(400, seed) for seed in range(3)])
    z[:, 0, [399, 71, 270]] = 9  # in both slices, and in both halves
    z[:, 1, [264, 200, 64]] = 9  # of one thread, which comes by 200 first
    found = np.array(draw(mx.array(z), keys(3, 5), mx.array([0, 1, 0, 0], mx.int32)))
    assert np.array_equal(found[::2], z.argmax(axis=-1)[::2])
    assert not np.array_equal(found[1], z.argmax(axis=-1)[1])


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_a_position_hangs_on_its_own_numbers_alone() -> None:
    z, own = mx.array(np.stack([laws(300, seed) for seed in range(3)])), keys(4, 7)
    noisy = mx.array([1, 0, 1, 0], mx.int32)
    together = np.array(draw(z, own, noisy))
    for row, position in ((0, 0), (1, 2), (2, 1), (2, 4)):
        alone = draw(
            z[row : row + 1, position : position + 1], own[row:, position : position + 2], noisy[row : row + 2]
        )
        assert np.array(alone).item() == together[row, position]
    again = np.array(draw(mx.array(np.where(np.arange(5)[:, None] == 1, np.nan, np.array(z))), own, noisy))
    assert np.array_equal(again[:, [0, 2, 3, 4]], together[:, [0, 2, 3, 4]])


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_no_noise_is_infinite() -> None:
    """This key's bits for token 5 are all 0; with a Gumbel of -inf, nothing would be found."""
    key = mx.array([1, 48_737_070], mx.uint32)
    z = mx.where(mx.arange(16) == 5, 0.0, -mx.inf)[None, None]
    assert np.isneginf(np.array(mx.random.gumbel((16,), key=key))[5])
    assert draw(z, key[None, None], NOISY).item() == 5


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_where_nothing_is_allowed_the_token_is_one_of_the_vocabulary() -> None:
    z = mx.stack([mx.full((300,), -mx.inf), mx.full((300,), mx.nan)])[None]
    assert np.array(draw(z, keys(1, 2), NOISY)).tolist() == [[0, 0]]


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_the_check_finds_a_key_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subject._check_error(600) == 0
    monkeypatch.setattr(subject, "draw", lambda z, keys, noisy: draw(z, keys ^ mx.array([0, 1], mx.uint32), noisy))
    assert subject._check_error(600) > 0


@needs_compiler
def test_the_check_on_whole_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device launches them."""
    kernels_on_host(monkeypatch)
    assert subject._check_error(4500) == 0


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_host(monkeypatch)
    assert fits(248_320)
    assert not fits(1 << 24)
    z, own = mx.zeros((2, 3, 8)), keys(2, 3)
    wrong = [
        (z[0], own, NOISY),
        (z.astype(mx.bfloat16), own, NOISY),
        (z, own.astype(mx.int32), NOISY),
        (z, own, NOISY.astype(mx.uint32)),
        (z, own[:1], NOISY),
        (z, own[:, :2], NOISY),
        (z, own, NOISY[:1]),
        (z, own[..., :1], NOISY),
        (z[:, :0], own, NOISY),
    ]
    for given in wrong:
        with pytest.raises(ValueError, match="draw"):
            draw(*given)
