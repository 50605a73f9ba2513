"""Attention of few queries against a long KV: plain MLX, and kernels. Knows shapes, and nothing of caches or models.

Keys are split at fixed positions, each split has its own softmax, and a second kernel joins them (Dao et al., 2023,
"Flash-Decoding for long-context inference"; the running softmax is Milakov and Gimelshein, arXiv:1805.02867). A query's
bits depend on its own numbers and on the keys that it sees: not on the other queries, the other rows, or capacities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from .portable import Backend, Call, Kernel, Launch, backend, most_shared, one_a_row, remember, row_chunks
from .self_check import SelfCheck, relative_error, speed_over
from .small_arrays import constant, numbers

__all__ = ["CHECK", "few_query_attention", "few_query_attention_reference", "fits", "fits_sizes"]

_HEAD_SIZES = (64, 128, 256)
_DTYPES = (mx.float32, mx.bfloat16, mx.float16)
_MOST_TOKENS = 16
_MOST_QUERIES = 128  # of a kv head
_MERGE_THREADS = 512
_PARTIAL = 64 << 20  # bytes of partial results that a launch of several rows may leave
_SHARED = 113 * 1024  # bytes for a threadgroup: two of them are on an SM of compute capability 9.0


@dataclass(frozen=True)
class _Splits:
    """Where keys are split: every `first` keys before `border`, every `late` behind it.

    A short context needs many threadgroups, a long one few splits, for what they leave to join is traffic too. Borders
    are absolute: they hang on no length.
    """

    first: int
    border: int
    late: int

    def count(self, keys: int) -> int:
        return -(-min(keys, self.border) // self.first) + -(-max(keys - self.border, 0) // self.late)


@dataclass(frozen=True)
class _Body:
    """A text for some dtypes. `serves` is not told shapes that a row's bits must not depend on.

    Attributes:
        blocks: numbers of queries of a kv head that a threadgroup may hold in registers, for a head size, in order;
            each is compiled anew, so there are few. More queries than the last are spread over several threadgroups,
            which read the keys again.
    """

    kernel: Kernel
    serves: Callable[[mx.Dtype], bool]
    splits: _Splits
    blocks: Callable[[int], Sequence[int]]
    launch: Callable[[_Body, mx.array, Sequence[mx.array]], Launch]

    def template(self, q: mx.array) -> dict[str, int | mx.Dtype]:
        """What partial results and their merge have in common."""
        return {
            "T": q.dtype,
            "D": q.shape[3],
            "SPLIT": self.splits.first,
        }

    def spread(self, q: mx.array, keys: Sequence[mx.array]) -> tuple[int, int]:
        """Queries that a threadgroup holds, and threadgroups over which those of a kv head are spread."""
        queries, sizes = q.shape[1] // keys[0].shape[1] * q.shape[2], self.blocks(q.shape[3])
        each = -(-queries // -(-queries // sizes[-1]))
        block = next(size for size in sizes if size >= each)
        return block, -(-queries // block)

    def found(self, q: mx.array, keys: Sequence[mx.array]) -> list[tuple[int, ...]]:
        """Shapes of the partial results: every row has as many splits as the largest buffer needs."""
        rows, heads, tokens, size = q.shape
        kv_heads, capacity = keys[0].shape[1], max(each.shape[2] for each in keys)
        shape = (rows, kv_heads, self.splits.count(capacity), heads // kv_heads * tokens)
        return [shape, shape, (*shape, size)]


_CALLS: dict[tuple[object, ...], list[tuple[slice, Call, Call]]] = {}


def few_query_attention(
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    lengths: mx.array,
    *,
    scale: float,
    gate: mx.array | None = None,
) -> mx.array:
    """softmax(scale q k^T) v for a row's newest tokens, whose keys and values are already written. Needs a GPU.

    Args:
        q: [B, Hq, T, D], fp32, bf16 or fp16; T is 1 to 16. See `fits`.
        keys, values: of each row [1, Hkv, capacity, D] in q's dtype, row-contiguous (copied if not); Hq is a multiple
            of Hkv, and every row may have a capacity of its own.
        lengths: [B] int32, at least 0 and at most the row's capacity: query t of row b sees the keys
            0 .. lengths[b] - T + t. Never read by the host.
        scale: of the scores.
        gate: [B, T, N] in q's dtype, N at least 2 * Hq * D: that of head h at columns (2h + 1) D .. (2h + 2) D, as in
            `attention_inputs`.

    Returns:
        [B, Hq, T, D] in q's dtype; 0 for a query that sees no key. With a gate [B, T, Hq * D]: the same, rounded, times
        the gate's sigmoid.

    Raises:
        ValueError: the kernels do not take these shapes or dtypes.
        RuntimeError: there is no GPU.
    """
    own = [(x.shape, x.dtype) for x in (*keys, *values)]
    others = lengths.shape, lengths.dtype, None if gate is None else (gate.shape, gate.dtype)
    key = (q.shape, q.dtype, *own, len(keys), *others)
    calls = _CALLS.get(key)
    if calls is None:
        calls = remember(_CALLS, key, _prepared(q, keys, values, lengths, gate))
    found = []
    for at, partial, merge in calls:
        buffers = *one_a_row(keys[at]), *one_a_row(values[at])
        parts = partial(inputs=[q[at], *buffers, lengths[at], constant(scale)])
        found += merge(inputs=[*parts, lengths[at], (q if gate is None else gate)[at]])
    return found[0] if len(found) == 1 else mx.concatenate(found)


def few_query_attention_reference(
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    lengths: mx.array,
    *,
    scale: float,
    gate: mx.array | None = None,
) -> mx.array:
    """The same by plain MLX operations, in fp32; any device, any shape. Arguments as of `few_query_attention`."""
    outputs = []
    for row, (own_keys, own_values) in enumerate(zip(keys, values, strict=True)):
        at = slice(row, row + 1)
        opening = None if gate is None else gate[at]
        outputs.append(_row_reference(q[at], own_keys, own_values, lengths[at], scale, opening))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _row_reference(
    q: mx.array, keys: mx.array, values: mx.array, lengths: mx.array, scale: float, gate: mx.array | None
) -> mx.array:
    rows, heads, tokens, size = q.shape
    kv_heads, capacity = keys.shape[1:3]
    queries = q.astype(mx.float32).reshape(rows, kv_heads, heads // kv_heads * tokens, size)
    last = lengths[:, None] - tokens + mx.arange(tokens)
    sees = mx.arange(capacity) <= mx.tile(last, (1, heads // kv_heads))[:, None, :, None]
    written = (mx.arange(capacity) < lengths[:, None])[:, None, :, None]
    scores = queries @ mx.where(written, keys, 0).astype(mx.float32).swapaxes(-1, -2) * scale
    scores = mx.where(sees, scores, -mx.inf)
    top = mx.maximum(scores.max(axis=-1, keepdims=True), mx.finfo(mx.float32).min)
    weights = mx.exp(scores - top)
    total = mx.maximum(weights.sum(axis=-1, keepdims=True), mx.finfo(mx.float32).smallest_normal)
    out = weights @ mx.where(written, values, 0).astype(mx.float32) / total
    out = out.reshape(q.shape).astype(q.dtype)
    if gate is None:
        return out
    opening = gate[:, :, : 2 * heads * size].reshape(rows, tokens, heads, 2, size)[:, :, :, 1].astype(mx.float32)
    gated = out.swapaxes(1, 2).astype(mx.float32) * mx.sigmoid(opening)
    return gated.reshape(rows, tokens, heads * size).astype(q.dtype)


def fits(q: mx.array, keys: Sequence[mx.array]) -> bool:
    """Whether the kernels take queries [B, Hq, T, D] and each row's keys [1, Hkv, capacity, D], by shape and dtype."""
    rows, heads, tokens, size = q.shape
    if rows != len(keys) or any(each.ndim != 4 for each in keys):
        return False
    kv_heads = keys[0].shape[1]
    own = (1, kv_heads, size, q.dtype)
    return all((*each.shape[:2], each.shape[3], each.dtype) == own for each in keys) and fits_sizes(
        heads=heads, kv_heads=kv_heads, tokens=tokens, size=size, dtype=q.dtype
    )


def fits_sizes(*, heads: int, kv_heads: int, tokens: int, size: int, dtype: mx.Dtype) -> bool:
    """The same of Hq, Hkv, T, D and a dtype."""
    return (
        size in _HEAD_SIZES
        and dtype in _DTYPES
        and heads % kv_heads == 0
        and 1 <= tokens <= _MOST_TOKENS
        and heads // kv_heads * tokens <= _MOST_QUERIES
    )


def _prepared(
    q: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array], lengths: mx.array, gate: mx.array | None
) -> list[tuple[slice, Call, Call]]:
    """Chunks of the rows, and for each partial results and their merge."""
    given = [x for x in (q, *keys, *values, lengths, gate) if x is not None]
    wanted = (q.shape[0], q.shape[2], q.dtype)
    if (
        not fits(q, keys)
        or [(x.shape, x.dtype) for x in values] != [(x.shape, x.dtype) for x in keys]
        or (lengths.shape, lengths.dtype) != ((q.shape[0],), mx.int32)
        or (gate is not None and (*gate.shape[:2], gate.dtype) != wanted)
        or (gate is not None and (gate.ndim != 3 or gate.shape[2] < 2 * q.shape[1] * q.shape[3]))
    ):
        shapes = ", ".join(f"{x.dtype} {x.shape}" for x in given)
        raise ValueError(f"few_query_attention does not take q, keys, values, lengths (and gate) of {shapes}")
    body = next(body for body in _BODIES[backend() or "host"] if body.serves(q.dtype))
    of_a_row = 4 * math.prod(body.found(q, keys)[-1][1:])
    chunks = row_chunks(len(keys), max(_PARTIAL // of_a_row, 1))
    return [(at, *_chunk_prepared(body, q[at], keys[at], gated=gate is not None)) for at in chunks]


def _chunk_prepared(body: _Body, q: mx.array, keys: Sequence[mx.array], *, gated: bool) -> tuple[Call, Call]:
    rows = len(one_a_row(keys))
    partial = body.kernel.for_rows(rows)
    return (
        partial.prepared(body.launch(body, q, keys), [*[q.dtype] * (1 + 2 * rows), mx.int32, mx.float32]),
        _MERGE.prepared(_merge_launch(body, q, keys, gated=gated), [*[mx.float32] * 3, mx.int32, q.dtype]),
    )


def _simd_launch(body: _Body, q: mx.array, keys: Sequence[mx.array]) -> Launch:
    (block, blocks), found = body.spread(q, keys), body.found(q, keys)
    return Launch(
        template={**body.template(q), "BLOCK": block},
        threadgroups=(found[0][2], keys[0].shape[1] * blocks, q.shape[0]),
        threads=q.shape[3] // 2,
        shapes=found,
        dtypes=[mx.float32] * 3,
    )


def _mma_launch(body: _Body, q: mx.array, keys: Sequence[mx.array]) -> Launch:
    size, (block, blocks), found = q.shape[3], body.spread(q, keys), body.found(q, keys)
    # Queries, two boards of scores, and as many places for keys and values as there is room for.
    fixed, place = block // 8 * (16 * size + 2 * 8 * 64 * 4), size // 64 * 4096
    ring = min(6, (min(_SHARED, most_shared()) * max(size, 128) // 256 - fixed) // place)
    return Launch(
        template={
            **body.template(q),
            "LATE": body.splits.late,
            "BORDER": body.splits.border,
            "BLOCK": block,
            "RING": ring,
        },
        threadgroups=(keys[0].shape[1] * blocks, found[0][2], q.shape[0]),
        threads=size // 2,
        shapes=found,
        dtypes=[mx.float32] * 3,
        shared=ring * place + fixed,
    )


def _merge_launch(body: _Body, q: mx.array, keys: Sequence[mx.array], *, gated: bool) -> Launch:
    rows, heads, tokens, size = q.shape
    kv_heads = keys[0].shape[1]
    return Launch(
        template={
            **body.template(q),
            "LATE": body.splits.late,
            "BORDER": body.splits.border,
            "GATED": int(gated),
        },
        threadgroups=(heads // kv_heads * tokens, kv_heads, rows),
        threads=_MERGE_THREADS,
        shapes=[(rows, tokens, heads * size) if gated else q.shape],
        dtypes=[q.dtype],
    )


def _kernel(name: str, *parts: str) -> Kernel:
    inputs, outputs = ("q", "keys", "values", "lengths", "scale"), ("most_of", "sums", "weighted")
    return Kernel(name, inputs, outputs, parts, many=("keys", "values"))


_MERGE = Kernel("few_query_merge", ("most_of", "sums", "weighted", "lengths", "gate"), ("out",))

# Without matrix units; serves every dtype.
_SIMD = _Body(
    _kernel("few_query_partial"),
    lambda dtype: True,
    _Splits(256, 256, 256),
    lambda size: (4, 8, 16, 24, 32),
    _simd_launch,
)
_MMA = _Body(
    _kernel("few_query_partial_mma", "mma"),
    lambda dtype: dtype != mx.float32,
    _Splits(64, 4096, 512),
    lambda size: (16, 32, 48) if size == 256 else (16, 32),
    _mma_launch,
)

# In order of preference; the last of each serves every dtype.
_BODIES: Mapping[Backend, tuple[_Body, ...]] = {"metal": (_SIMD,), "cuda": (_MMA, _SIMD), "host": (_SIMD,)}


def _check_error() -> float:
    """What models use, a gate and heads of 256. The third case reaches behind the border of longer splits."""
    last = max(body.splits.border for bodies in _BODIES.values() for body in bodies)
    cases = ((6, 4, 256, 256), (3, 2, 256, 256), (6, 4, 256, last))
    errors = [_case_error(*case, seed=seed) for seed, case in enumerate(cases, start=1)]
    return math.nan if any(map(math.isnan, errors)) else max(errors)  # `max` can lose a NaN


def _case_error(group: int, tokens: int, size: int, border: int, *, seed: int) -> float:
    """Error of the kernels on two rows, of unlike capacities, one of which ends about a border of the splits; behind
    their lengths there is NaN.

    Infinite if a query's bits depend on the other tokens, or on the other row.
    """
    kv_heads, ends, scale = 2, (border + 1, 40), size**-0.5
    for_q, for_kv, for_gate = mx.random.split(mx.random.key(seed), 3)
    q = mx.random.normal((2, kv_heads * group, tokens, size), mx.bfloat16, key=for_q)
    kv = mx.random.normal((2, 2, kv_heads, border + 44, size), mx.bfloat16, key=for_kv)
    gate = mx.random.normal((2, tokens, 2 * kv_heads * group * size), mx.bfloat16, key=for_gate)

    def own(all_rows: mx.array, row: int) -> mx.array:
        written = mx.arange(ends[row] + 43) < ends[row]
        return mx.where(written[:, None], all_rows[row : row + 1, :, : written.size], mx.array(mx.nan, mx.bfloat16))

    keys, values = ([own(each, row) for row in range(2)] for each in kv)
    lengths = mx.array(ends, mx.int32)
    found = few_query_attention(q, keys, values, lengths, scale=scale, gate=gate)
    for row in range(2):
        at = slice(row, row + 1)
        for some in {tokens, 1}:
            given = q[at, :, :some] + 0, keys[at], values[at], lengths[at] - tokens + some
            alone = few_query_attention(*given, scale=scale, gate=gate[at, :some] + 0)
            if not mx.array_equal(alone, found[at, :some]).item():
                return float("inf")
    return relative_error(found, few_query_attention_reference(q, keys, values, lengths, scale=scale, gate=gate))


def _gain() -> float:
    """Of one token and of four, together, over 8,192 keys; with a gate, for that was compiled for `_check_error`."""
    heads, kv_heads, size = 24, 4, 256
    queries = [mx.random.normal((1, heads, tokens, size)).astype(mx.bfloat16) for tokens in (1, 4)]
    kv = [mx.random.normal((1, kv_heads, 8192, size)).astype(mx.bfloat16) for _ in range(8)]
    gates = [mx.random.normal((1, q.shape[2], 2 * heads * size)).astype(mx.bfloat16) for q in queries]
    length = numbers((8192,))
    mx.eval(queries, kv, gates)
    pairs = list(zip(kv[::2], kv[1::2], strict=True))

    def stock() -> list[mx.array]:
        found = []
        for q, gate in zip(queries, gates, strict=True):
            tokens = q.shape[2]
            opening = gate.reshape(1, tokens, heads, 2 * size)[..., size:].reshape(1, tokens, -1)
            for pair in pairs:
                mask = "causal" if tokens > 1 else None
                each = mx.fast.scaled_dot_product_attention(q, *pair, scale=size**-0.5, mask=mask)
                found.append(each.swapaxes(1, 2).reshape(1, tokens, -1) * mx.sigmoid(opening))
        return found

    def ours() -> list[mx.array]:
        return [
            few_query_attention(q, [keys], [values], length, scale=size**-0.5, gate=gate)
            for q, gate in zip(queries, gates, strict=True)
            for keys, values in pairs
        ]

    return speed_over(stock, ours)


# Both work in fp32 and round twice, to bf16, before and behind the gate; on tensor cores the weights of values are
# rounded as well. Each may go to a neighbour, at most 2**-7 of a value away. One key of 257 too few changes 0.1.
CHECK = SelfCheck("few_query_attention", _check_error, most=2**-6, gain=_gain)
