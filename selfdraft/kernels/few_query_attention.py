"""Attention of few queries against a long KV: plain MLX, and kernels. Knows shapes, and nothing of caches or models.

Keys are split at fixed positions, each split has its own softmax, and a second kernel joins them (Dao et al., 2023,
"Flash-Decoding for long-context inference"; the running softmax is Milakov and Gimelshein, arXiv:1805.02867). A query's
bits depend on its own numbers and on the keys that it sees: not on the other queries, the other rows, or the capacity.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .portable import Call, Kernel, Launch, number
from .self_check import SelfCheck, relative_error, speed_over

__all__ = ["CHECK", "SPLIT", "few_query_attention", "few_query_attention_reference", "fits"]

SPLIT = (
    256  # keys a threadgroup takes: fewer would leave more to join, more would leave a short context few threadgroups
)

_HEAD_SIZES = (64, 128, 256)
_DTYPES = (mx.float32, mx.bfloat16, mx.float16)
_MOST_TOKENS = 16
_MOST_QUERIES = 128  # of a kv head
_BLOCK = 32  # queries that a threadgroup can hold in registers; more are spread over several, which read the keys again
_MERGE_THREADS = 512

_PARTIAL = Kernel(
    "few_query_partial",
    ("q", "keys", "values", "lengths", "scale"),
    ("most_of", "sums", "weighted"),
)
_MERGE = Kernel("few_query_merge", ("most_of", "sums", "weighted", "lengths"), ("out",))

_CALLS: dict[tuple[object, ...], tuple[Call, Call]] = {}


def few_query_attention(q: mx.array, keys: mx.array, values: mx.array, lengths: mx.array, *, scale: float) -> mx.array:
    """softmax(scale q k^T) v for a row's newest tokens, whose keys and values are already written. Needs a GPU.

    Args:
        q: [B, Hq, T, D], fp32, bf16 or fp16; T is 1 to 16. See `fits`.
        keys, values: [B, Hkv, capacity, D] in q's dtype, row-contiguous (copied if not); Hq is a multiple of Hkv.
        lengths: [B] int32, at least 0 and at most the capacity: query t of row b sees the keys 0 .. lengths[b] - T + t.
            Never read by the host.
        scale: of the scores.

    Returns:
        [B, Hq, T, D] in q's dtype; 0 for a query that sees no key.

    Raises:
        ValueError: the kernels do not take these shapes or dtypes.
        RuntimeError: there is no GPU.
    """
    key = (q.shape, q.dtype, keys.shape, keys.dtype, values.shape, values.dtype)
    calls = _CALLS.get(key)
    if calls is None:
        calls = _CALLS[key] = _prepared(q, keys, values)
    found = calls[0](inputs=[q, keys, values, lengths, _factor(scale)])
    return calls[1](inputs=[*found, lengths])[0]


def few_query_attention_reference(
    q: mx.array, keys: mx.array, values: mx.array, lengths: mx.array, *, scale: float
) -> mx.array:
    """The same by plain MLX operations, in fp32; any device, any shape. Arguments as of `few_query_attention`."""
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
    return out.reshape(q.shape).astype(q.dtype)


def fits(q: mx.array, keys: mx.array) -> bool:
    """Whether the kernels take queries [B, Hq, T, D] and keys [B, Hkv, capacity, D] of these shapes and dtypes."""
    rows, heads, tokens, size = q.shape
    kv_rows, kv_heads, _, kv_size = keys.shape
    return (
        size in _HEAD_SIZES
        and q.dtype in _DTYPES
        and (rows, size, q.dtype) == (kv_rows, kv_size, keys.dtype)
        and heads % kv_heads == 0
        and 1 <= tokens <= _MOST_TOKENS
        and heads // kv_heads * tokens <= _MOST_QUERIES
    )


def _prepared(q: mx.array, keys: mx.array, values: mx.array) -> tuple[Call, Call]:
    if not fits(q, keys) or (values.shape, values.dtype) != (keys.shape, keys.dtype):
        shapes = ", ".join(f"{x.dtype} {x.shape}" for x in (q, keys, values))
        raise ValueError(f"few_query_attention does not take q, keys, values of {shapes}")
    partial, merge = _launches(q, keys)
    return (
        _PARTIAL.prepared(partial, [q.dtype, q.dtype, q.dtype, mx.int32, mx.float32]),
        _MERGE.prepared(merge, [mx.float32, mx.float32, mx.float32, mx.int32]),
    )


@lru_cache
def _factor(scale: float) -> mx.array:
    array = mx.array([scale], mx.float32)
    mx.eval(array)
    return array


def _launches(q: mx.array, keys: mx.array) -> tuple[Launch, Launch]:
    rows, heads, tokens, size = q.shape
    kv_heads, capacity = keys.shape[1:3]
    queries = heads // kv_heads * tokens
    blocks = -(-queries // _BLOCK)
    splits = -(-capacity // SPLIT)
    template: dict[str, int | mx.Dtype] = {
        "T": q.dtype,
        "D": size,
        "HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "TOKENS": tokens,
        "SPLIT": SPLIT,
    }
    found = (rows, kv_heads, splits, queries)
    partial = Launch(
        template={**template, "BLOCK": -(-queries // blocks)},
        threadgroups=(splits, kv_heads * blocks, rows),
        threads=size // 2,
        shapes=[found, found, (*found, size)],
        dtypes=[mx.float32] * 3,
    )
    merge = Launch(
        template=template,
        threadgroups=(queries, kv_heads, rows),
        threads=_MERGE_THREADS,
        shapes=[q.shape],
        dtypes=[q.dtype],
    )
    return partial, merge


def _check_error() -> float:
    return max(_case_error(6, 4, 128, seed=1), _case_error(3, 2, 256, seed=2))


def _case_error(group: int, tokens: int, size: int, *, seed: int) -> float:
    """Error of the kernels on two rows whose lengths are about a border of the splits, behind which there is NaN."""
    lengths, capacity, kv_heads = mx.array([SPLIT + 1, 40], mx.int32), SPLIT + 44, 2
    for_q, for_kv = mx.random.split(mx.random.key(seed))
    q = mx.random.normal((2, kv_heads * group, tokens, size), mx.bfloat16, key=for_q)
    kv = mx.random.normal((2, 2, kv_heads, capacity, size), mx.bfloat16, key=for_kv)
    written = (mx.arange(capacity) < lengths[:, None])[:, None, :, None]
    keys, values = mx.where(written, kv, mx.array(mx.nan, mx.bfloat16))
    found = few_query_attention(q, keys, values, lengths, scale=size**-0.5)
    return relative_error(found, few_query_attention_reference(q, keys, values, lengths, scale=size**-0.5))


def _gain() -> float:
    """Of one query and of four, together, over 8,192 keys."""
    queries = [mx.random.normal((1, 16, tokens, 256)).astype(mx.bfloat16) for tokens in (1, 4)]
    kv = [mx.random.normal((1, 4, 8192, 256)).astype(mx.bfloat16) for _ in range(8)]
    length = number(8192)
    mx.eval(queries, kv)
    given = [(q, keys, values) for q in queries for keys, values in zip(kv[::2], kv[1::2], strict=True)]

    def stock() -> list[mx.array]:
        attention = mx.fast.scaled_dot_product_attention
        return [attention(*each, scale=1 / 16, mask="causal" if each[0].shape[2] > 1 else None) for each in given]

    return speed_over(stock, lambda: [few_query_attention(*each, length, scale=1 / 16) for each in given])


# Both work in fp32 and round once, to bf16: to neighbours at worst, and those are at most 2**-7 of a value apart. One
# key of 257 too few changes the result by more than twice that.
CHECK = SelfCheck("few_query_attention", _check_error, most=2**-7, gain=_gain)
