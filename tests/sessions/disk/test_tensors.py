"""Arrays as files and back: bit for bit in every dtype, whole or cut, and within a file's size."""

from __future__ import annotations

import io
import math

import mlx.core as mx
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from selfdraft.sessions.disk.tensors import join, split

from .support import bits

DTYPES = {
    mx.bfloat16: np.uint16,
    mx.float16: np.uint16,
    mx.float32: np.uint32,
    mx.uint32: np.uint32,
    mx.int32: np.uint32,
    mx.int64: np.uint64,
    mx.uint8: np.uint8,
}


def random_bits(dtype: mx.Dtype, shape: tuple[int, ...], seed: int = 0) -> mx.array:
    """Any bits: NaN with and without payload, infinities and subnormals among them."""
    kind = DTYPES[dtype]
    raw = np.random.default_rng(seed).integers(0, np.iinfo(kind).max, size=shape, dtype=kind, endpoint=True)
    return mx.array(raw).view(dtype)


def there_and_back(arrays: dict[str, mx.array], most: int) -> dict[str, mx.array]:
    mx.eval(arrays)
    units, cut = split(arrays, most)
    assert all(unit.size <= most for unit in units)
    return join([b"".join(unit.content) for unit in units], cut)


@pytest.mark.parametrize("most", [2**20, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_survive(dtype: mx.Dtype, most: int) -> None:
    arrays = {"x": random_bits(dtype, (3, 7, 50)), "y": random_bits(dtype, (5,), 1)}
    assert bits(there_and_back(arrays, most)) == bits(arrays)


def test_payloads_of_nan_survive() -> None:
    nans = {
        "bf16": mx.array([0x7F81, 0xFFC1, 0x7FFF], dtype=mx.uint16).view(mx.bfloat16),
        "fp16": mx.array([0x7C01, 0xFE01, 0x7FFF], dtype=mx.uint16).view(mx.float16),
        "fp32": mx.array([0x7F800001, 0xFFC00123], dtype=mx.uint32).view(mx.float32),
    }
    assert bits(there_and_back(nans, 4096)) == bits(nans)


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(
    st.dictionaries(st.text("abc.0", min_size=1, max_size=12), st.tuples(shapes, st.sampled_from(list(DTYPES)))),
    st.integers(400, 3000),
)
def test_any_arrays_survive_in_files_of_any_size(
    wanted: dict[str, tuple[tuple[int, ...], mx.Dtype]], most: int
) -> None:
    arrays = {name: random_bits(dtype, shape, len(name)) for name, (shape, dtype) in wanted.items()}
    assert bits(there_and_back(arrays, most)) == bits(arrays)


def test_views_are_written_as_they_look() -> None:
    x = mx.arange(60, dtype=mx.float32).reshape(3, 20)
    views = {"transposed": x.T, "strided": x[:, ::3], "tail": x[1:, 5:]}
    assert bits(there_and_back(views, 400)) == {
        name: ("mlx.core.float32", view.shape, np.array(view).tobytes()) for name, view in views.items()
    }


def test_files_are_what_others_read_too() -> None:
    arrays = {"x": random_bits(mx.bfloat16, (2, 3)), "empty": mx.zeros((0, 2)), "scalar": mx.array(3.5)}
    mx.eval(arrays)
    units, _ = split(arrays, 4096)
    (content,) = [b"".join(unit.content) for unit in units]
    assert {name for name, _ in safetensors.deserialize(content)} == set(arrays)
    loaded = mx.load(io.BytesIO(content), format="safetensors")
    assert isinstance(loaded, dict)
    assert bits(loaded) == bits(arrays)


def test_the_same_arrays_make_the_same_files() -> None:
    x, y = mx.ones((4,)), mx.zeros((4,))
    mx.eval(x, y)
    one, other = split({"x": x, "y": y}, 4096), split({"y": y, "x": x}, 4096)
    assert [b"".join(unit.content) for unit in one[0]] == [b"".join(unit.content) for unit in other[0]]


def test_files_are_filled() -> None:
    x = mx.zeros((10_000,), dtype=mx.uint8)
    mx.eval(x)
    units, cut = split({"x": x}, 1000)
    assert cut == {"x": (10_000,)}
    assert len(units) <= math.ceil(10_000 / (1000 - 400))
