"""DeepSeek-V3.2 (arXiv 2512.02556) and GLM-5: DeepSeek-V3 with sparse attention, in the trunk and in its MTP module.

A small indexer scores all earlier positions for each query, and the query attends to the best `index_topk` of them.
The indexer's keys lie beside the rotated keys in a row's buffer. Which positions are chosen must not hang on how many
queries come in at once, so of equal scores the earliest win.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.deepseek_v32 import DeepseekV32Attention, DeepseekV32DecoderLayer, ModelArgs

from ..errors import CheckpointError
from ..state import KeyValueShape
from .base import Architecture, register
from .deepseek_v3 import assemble, canonical, family_args, model_of
from .latent_attention import LatentAttention, Queries, causal
from .transformer import Transformer

__all__ = ["best", "build"]

_WHOLE_NUMBERS = ("q_lora_rank", "index_head_dim", "index_n_heads", "index_topk")


class Attention(LatentAttention, DeepseekV32Attention):  # type: ignore[misc]
    """Latent attention to chosen positions, the same for one token and for all of a verify pass."""

    indexer: Any

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        # Two norms have a fixed epsilon in mlx-lm; vLLM's `deepseek_v2.py` takes the model's for these, and this for
        # the indexer's.
        self.q_a_layernorm.eps = self.kv_a_layernorm.eps = args.rms_norm_eps
        self.indexer.k_norm.eps = 1e-6

    def kept_keys(self, x: mx.array, rotated: mx.array, offset: int) -> mx.array:
        index_keys = self.indexer.k_norm(self.indexer.wk(x))[:, None]
        return mx.concatenate([rotated, self.indexer.rope(index_keys, offset).astype(rotated.dtype)], axis=-1)

    def seen(self, queries: Queries, keys: mx.array) -> mx.array | None:
        if keys.shape[2] <= self.indexer.index_topk:
            return super().seen(queries, keys)
        before = causal(queries)
        scores = self._scores(queries, keys[0, 0, :, self.qk_rope_head_dim :])
        return best(mx.where(before, scores, -mx.inf), self.indexer.index_topk) & before

    def attend_few(self, queries: Queries, keys: mx.array, latents: mx.array) -> mx.array:
        """Each query fetches what is chosen for it, so that it reads no more however long the row is."""
        seen = self.seen(queries, keys)
        if seen is None or keys.shape[2] <= self.indexer.index_topk:
            return super().attend_few(queries, keys, latents)
        places, filled = _places(seen, self.indexer.index_topk)
        within, rotated = (x.transpose(2, 1, 0, 3) for x in (self.embed_q(queries.plain), queries.rotated))
        near, near_keys = (x[0, 0][places][:, None] for x in (latents, keys))
        out = self.attend(within, rotated, near, near, near_keys, filled[:, None, None])
        unembedded: mx.array = self.unembed_out(out.transpose(2, 1, 0, 3))
        return unembedded

    def _scores(self, queries: Queries, index_keys: mx.array) -> mx.array:
        """The indexer's score of each of the keys [S, width] for each query, fp32 [T, S]."""
        indexer = self.indexer
        q = indexer.wq_b(queries.low_rank).reshape(1, queries.count, indexer.n_heads, -1)
        q = indexer.rope(q.transpose(0, 2, 1, 3), queries.offset)[0].transpose(1, 0, 2)
        of_heads = mx.maximum(q @ index_keys.T, 0).astype(mx.float32)
        weights = indexer.weights_proj(queries.x)[0, :, None].astype(mx.float32)
        scores: mx.array = (weights * (indexer.n_heads * indexer.head_dim) ** -0.5) @ of_heads
        return scores[:, 0]


def best(scores: mx.array, count: int) -> mx.array:
    """Which of the scores [..., S] are the `count` largest, bool: of equal ones the first.

    `argpartition` would choose among equal ones as it likes, and bf16 has many.
    """
    least = mx.topk(scores, count, axis=-1).min(axis=-1, keepdims=True)
    above, equal = scores > least, scores == least
    left = count - above.sum(axis=-1, keepdims=True)
    return above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= left))


def _places(seen: mx.array, most: int) -> tuple[mx.array, mx.array]:
    """Positions that are seen, at most `most` a query, in order: int32 [T, most], and which of those are any."""
    queries, positions = seen.shape
    order = mx.cumsum(seen.astype(mx.int32), axis=-1)
    slots = mx.where(seen, order - 1, most)
    values = mx.broadcast_to(mx.arange(positions), seen.shape)
    places = mx.put_along_axis(mx.zeros((queries, most + 1), mx.int32), slots, values, axis=-1)
    return places[:, :most], mx.arange(most) < order[:, -1:]


class DecoderLayer(DeepseekV32DecoderLayer):  # type: ignore[misc]
    """mlx-lm's, with that attention."""

    def __init__(self, args: ModelArgs, index: int) -> None:
        super().__init__(args, index)
        self.self_attn = Attention(args)


def build(config: Mapping[str, Any], with_head: bool) -> Transformer:
    """A model of a text config."""
    _refuse_shared_indexers(config)
    glm = config.get("model_type") == "glm_moe_dsa"
    args = family_args(ModelArgs, {"indexer_rope_interleave": glm, **config}, _WHOLE_NUMBERS)
    if not isinstance(args.indexer_rope_interleave, bool):
        raise CheckpointError(
            f"config.json: indexer_rope_interleave must be true or false, not {args.indexer_rope_interleave!r}"
        )
    layer = KeyValueShape(1, args.qk_rope_head_dim + args.index_head_dim, args.kv_lora_rank)
    return model_of(config, args, partial(DecoderLayer, args), layer, with_head)


def _refuse_shared_indexers(config: Mapping[str, Any]) -> None:
    """GLM-5.2 and later leave out most layers' indexers: such a layer takes what one before it chose."""
    types, pattern = config.get("indexer_types") or [], config.get("index_topk_pattern") or ""
    shared = {
        "indexer_types": any(kind != "full" for kind in types),
        "index_topk_pattern": any(kind not in ("F", "full") for kind in pattern),
        "index_topk_freq": config.get("index_topk_freq", 1) != 1,
    }
    for name, found in shared.items():
        if found:
            raise CheckpointError(
                f"config.json: {name} {config[name]!r}: layers that share an indexer are not supported"
            )


register(
    Architecture(
        model_types=("deepseek_v32", "glm_moe_dsa"),
        build=build,
        canonical=canonical,
        assemble=assemble,
        verified="trunk and head: transformers (MtpModel); deeper drafts: the same layers, chained",
    )
)
