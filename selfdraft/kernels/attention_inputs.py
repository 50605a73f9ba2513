"""Queries, keys and values for attention from one fused projection: plain MLX, and a kernel.

Knows shapes, norms and rotary positions, and nothing of layers or caches. For few tokens a layer does these steps in
some eight operations, each of which costs more to start than to run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .few_query_attention import fits_sizes
from .portable import Call, Kernel, Launch, one_a_row, remember, row_chunks
from .self_check import SelfCheck, relative_error
from .small_arrays import constant

__all__ = ["CHECK", "attention_inputs", "attention_inputs_reference", "fits"]

_KERNEL = Kernel(
    "attention_inputs",
    ("projected", "q_norm", "k_norm", "inverse_frequencies", "keys", "values", "starts", "rope_deltas", "eps"),
    ("q",),
    updates=("keys", "values"),
    many=("keys", "values"),
)

_CALLS: dict[tuple[object, ...], list[Call]] = {}


def attention_inputs(
    projected: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    inverse_frequencies: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    starts: mx.array,
    rope_deltas: mx.array,
    *,
    heads: int,
    kv_heads: int,
    size: int,
    eps: float,
) -> mx.array:
    """Normalises and rotates queries and keys, and writes keys and values in place. Needs a GPU.

    The norm is that of Zhang and Sennrich (arXiv:1910.07467), rounded as `mx.fast.rms_norm` rounds; the rotation that
    of Su et al. (arXiv:2104.09864) on pairs (i, i + half), as `mlx.nn.RoPE` with traditional=False.

    Args:
        projected: [B, T, N], bf16, fp16 or fp32; N is 2 * heads * size + 2 * kv_heads * size: each head's query and
            gate side by side, then the keys of all kv heads, then the values.
        q_norm, k_norm: [size] in projected's dtype.
        inverse_frequencies: [half] fp32; dimensions from 2 * half on are not rotated.
        keys, values: of each row [1, kv_heads, capacity, size] in projected's dtype, row-contiguous and owned by the
            caller alone; every row may have a capacity of its own. They are written at starts[b] .. starts[b] + T - 1;
            positions behind the row's capacity are left out. Read them only in operations that take the result as well.
        starts: [B] int32. Never read by the host.
        rope_deltas: [B] int32: by how much the rotary positions of a row are beyond starts[b], starts[b] + 1, ...
        heads, kv_heads: of queries, and of keys. size: of a head. eps: of the norm.

    Returns:
        Queries [B, heads, T, size] in projected's dtype. Gates stay where they are.

    Raises:
        ValueError: the arguments do not go together, or `fits` is False.
        RuntimeError: there is no GPU.
    """
    shared = q_norm, k_norm, inverse_frequencies
    given = (projected, *shared, *keys, *values, starts, rope_deltas)
    key = (*((x.shape, x.dtype) for x in given), len(keys), heads, kv_heads, size)
    calls = _CALLS.get(key)
    if calls is None:
        places = starts, rope_deltas
        calls = remember(_CALLS, key, _prepared(projected, shared, keys, values, places, heads, kv_heads, size))
    found = []
    for call, at in zip(calls, row_chunks(len(keys)), strict=True):
        buffers = *one_a_row(keys[at]), *one_a_row(values[at])
        found += call(inputs=[projected[at], *shared, *buffers, starts[at], rope_deltas[at], constant(eps)])
    return found[0] if len(found) == 1 else mx.concatenate(found)


def attention_inputs_reference(
    projected: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    inverse_frequencies: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    starts: mx.array,
    rope_deltas: mx.array,
    *,
    heads: int,
    kv_heads: int,
    size: int,
    eps: float,
) -> tuple[mx.array, list[mx.array], list[mx.array]]:
    """The same by plain MLX operations, any device: queries, and each row's new arrays of keys and values."""
    found = []
    for row, pair in enumerate(zip(keys, values, strict=True)):
        at = slice(row, row + 1)
        own = projected[at], q_norm, k_norm, inverse_frequencies, *pair, starts[at], rope_deltas[at]
        found.append(_row_reference(*own, heads=heads, kv_heads=kv_heads, size=size, eps=eps))
    queries, new_keys, new_values = (list(each) for each in zip(*found, strict=True))
    return queries[0] if len(queries) == 1 else mx.concatenate(queries), new_keys, new_values


def _row_reference(
    projected: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    inverse_frequencies: mx.array,
    keys: mx.array,
    values: mx.array,
    starts: mx.array,
    rope_deltas: mx.array,
    *,
    heads: int,
    kv_heads: int,
    size: int,
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    rows, tokens, _ = projected.shape
    both, new_keys, new_values = mx.split(projected, [2 * heads * size, (2 * heads + kv_heads) * size], axis=-1)
    queries = both.reshape(rows, tokens, heads, 2, size)[:, :, :, 0]

    def rotated(x: mx.array, weight: mx.array) -> mx.array:
        x = mx.fast.rms_norm(x, weight, eps).swapaxes(1, 2)
        dims, periods = 2 * inverse_frequencies.size, 1 / inverse_frequencies
        first = starts + rope_deltas
        return mx.fast.rope(x, dims, traditional=False, base=None, scale=1.0, offset=first, freqs=periods)

    index = mx.arange(keys.shape[2]) - starts[:, None]  # of the token that a position takes
    taken = ((index >= 0) & (index < tokens))[:, None, :, None]
    index = mx.clip(index, 0, tokens - 1)[:, None, :, None]

    def written(old: mx.array, new: mx.array) -> mx.array:
        return mx.where(taken, mx.take_along_axis(new, index, axis=2), old)

    new_keys = rotated(new_keys.reshape(rows, tokens, kv_heads, size), k_norm)
    new_values = new_values.reshape(rows, tokens, kv_heads, size).swapaxes(1, 2)
    return rotated(queries, q_norm), written(keys, new_keys), written(values, new_values)


def fits(projected: mx.array, *, heads: int, kv_heads: int, size: int) -> bool:
    """Whether the kernel takes such a projection, and `few_query_attention` its queries, by shape and dtype."""
    return (
        projected.ndim == 3
        and projected.shape[2] == 2 * (heads + kv_heads) * size
        and fits_sizes(heads=heads, kv_heads=kv_heads, tokens=projected.shape[1], size=size, dtype=projected.dtype)
    )


def _prepared(
    projected: mx.array,
    shared: tuple[mx.array, mx.array, mx.array],
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    places: tuple[mx.array, mx.array],
    heads: int,
    kv_heads: int,
    size: int,
) -> list[Call]:
    """A call for each chunk of the rows."""
    (q_norm, k_norm, frequencies), rows, dtype = shared, projected.shape[0], projected.dtype
    norm = ((size,), dtype)
    if (
        not fits(projected, heads=heads, kv_heads=kv_heads, size=size)
        or len(keys) != rows
        or any((x.ndim, *x.shape[:2], x.shape[-1], x.dtype) != (4, 1, kv_heads, size, dtype) for x in keys)
        or [(x.shape, x.dtype) for x in values] != [(x.shape, x.dtype) for x in keys]
        or frequencies.dtype != mx.float32
        or (frequencies.ndim, min(frequencies.size, size // 2)) != (1, frequencies.size)
        or any((x.shape, x.dtype) != norm for x in (q_norm, k_norm))
        or any((x.shape, x.dtype) != ((rows,), mx.int32) for x in places)
    ):
        shapes = ", ".join(f"{x.dtype} {x.shape}" for x in (projected, *shared, *keys, *values, *places))
        raise ValueError(f"attention_inputs does not take {heads} and {kv_heads} heads of {size} with {shapes}")
    return [_chunk_prepared(projected[at], keys[at], heads, kv_heads, size) for at in row_chunks(rows)]


def _chunk_prepared(projected: mx.array, keys: Sequence[mx.array], heads: int, kv_heads: int, size: int) -> Call:
    dtype, arrays = projected.dtype, len(one_a_row(keys))
    rows, tokens = projected.shape[:2]
    launch = Launch(
        template={"T": dtype, "SIZE": size},
        threadgroups=(heads + 2 * kv_heads, tokens, rows),
        threads=32,
        shapes=[(rows, heads, tokens, size)],
        dtypes=[dtype],
    )
    inputs = [dtype] * 3 + [mx.float32] + [dtype] * (2 * arrays) + [mx.int32] * 2 + [mx.float32]
    return _KERNEL.for_rows(arrays).prepared(launch, inputs)


def _error() -> float:
    """Of queries, keys and values, all that was there before among them; of two rows and of one, in capacities that
    differ. Infinite if a row's queries depend on the other row."""
    heads, kv_heads, size, tokens, capacity = 4, 2, 256, 3, 20  # the text of models with heads of this size
    parts = mx.random.split(mx.random.key(7), 4)
    projected = mx.random.normal((2, tokens, 2 * (heads + kv_heads) * size), mx.bfloat16, key=parts[0])
    norms = [1 + 0.1 * mx.random.normal((size,), mx.bfloat16, key=part) for part in parts[1:3]]
    frequencies = mx.exp(-mx.arange(32, dtype=mx.float32) / 4)
    kv = mx.random.normal((2, 2, kv_heads, capacity, size), mx.bfloat16, key=parts[3])
    starts, rope_deltas = mx.array([5, capacity - 7], mx.int32), mx.array([0, -3], mx.int32)
    queries, errors = [], []
    for at in (slice(0, 2), slice(1, 2)):
        keys, values = ([x[row : row + 1, :, : capacity - 5 * row] + 0 for row in (0, 1)][at] for x in kv)
        given: Any = (projected[at], *norms, frequencies, keys, values, starts[at], rope_deltas[at])
        expected = attention_inputs_reference(*given, heads=heads, kv_heads=kv_heads, size=size, eps=1e-6)
        mx.eval(given, expected)  # the kernel owns keys and values from here on
        q = attention_inputs(*given, heads=heads, kv_heads=kv_heads, size=size, eps=1e-6)
        mx.eval(q)
        theirs = expected[0], *expected[1], *expected[2]
        errors += [relative_error(*pair) for pair in zip((q, *keys, *values), theirs, strict=True)]
        queries.append(q)
    if not mx.array_equal(queries[0][1:], queries[1]).item():
        return math.inf
    return math.nan if any(map(math.isnan, errors)) else max(errors)  # `max` can lose a NaN


# A norm is rounded twice and a rotation once, to bf16 in both; where a rounding falls on the other side, a step of bf16
# of one number enters the other of its pair too. A position that is off by one shows as some 0.5.
CHECK = SelfCheck("attention_inputs", _error, most=2.0**-6)
