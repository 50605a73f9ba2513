"""Guards keys and uniforms of a cycle: MLX's own, number by number, so that text does not hang on the kernel.

The text that GPUs run is run on the host.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels import noise_keys as subject
from selfdraft.kernels.noise_keys import noise_keys, noise_keys_reference
from tests.support.host_kernels import kernels_on_host, needs_compiler

STREAMS = mx.array([1, 2**32 - 3, 3, 4, 2**32 - 1, 7], mx.uint32)
COUNTERS = mx.array([2, 0, 2**31], mx.uint32)
SHIFT = mx.array([3, 0, 17, 99], mx.int32)


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_host(monkeypatch)


@needs_compiler
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, 16])
def test_they_are_those_of_mlx(depth: int) -> None:
    keys, uniforms = noise_keys(STREAMS, COUNTERS, SHIFT, depth)
    assert (keys.shape, keys.dtype) == ((3, depth + 1, 2), mx.uint32)
    assert np.array(keys)[0].tolist() == [[1, (2 + at) % 2**32] for at in range(depth + 1)]  # 2^32 - 3 + 2 + 3
    key = mx.array([1 ^ subject._UNIFORM, 2], mx.uint32)
    assert mx.array_equal(uniforms[0], mx.random.uniform(shape=(max(depth, 1),), key=key))
    for one, other in zip((keys, uniforms), noise_keys_reference(STREAMS, COUNTERS, SHIFT, depth), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert mx.array_equal(one, other)


@needs_compiler
def test_the_check_finds_a_counter_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subject._check_error() == 0
    monkeypatch.setattr(subject, "noise_keys", lambda s, counters, *given: noise_keys(s, counters + 1, *given))
    assert subject._check_error() > 0


def test_what_does_not_fit_is_refused() -> None:
    wrong = [
        (STREAMS.astype(mx.int32), COUNTERS, SHIFT, 1),
        (STREAMS.reshape(3, 2), COUNTERS, SHIFT, 1),
        (STREAMS[:4], COUNTERS, SHIFT, 1),
        (STREAMS, COUNTERS.astype(mx.int32), SHIFT, 1),
        (STREAMS, COUNTERS, SHIFT[:2], 1),
        (STREAMS, COUNTERS, COUNTERS, 1),
        (STREAMS, COUNTERS, SHIFT, -1),
    ]
    for given in wrong:
        with pytest.raises(ValueError, match="noise_keys"):
            noise_keys(*given)
