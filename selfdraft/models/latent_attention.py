"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over mlx-lm's projections.

A position keeps one latent [R] and one rotated key for all heads. Head n's keys and values are `embed_q[n]` and
`unembed_out[n]` of the latent. Few queries take those two into themselves and attend to latents; a prompt's many
queries are cheaper with keys and values written out. A verify pass must compute what plain decoding does, so the form
hangs on nothing but how many tokens come in, and all that a cycle can have are few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .config import whole_number
from .row_cache import Mask, RowCache
from .transformer import RECURRENT_DEPTH

__all__ = ["LatentAttention", "Queries", "causal", "split_latent_projections"]

FEW = RECURRENT_DEPTH + 1
SCORES = 2**28  # of all heads that a prompt's attention has at once


@dataclass(frozen=True)
class Queries:
    """T queries.

    Attributes:
        offset: position of the first.
        plain: without positions, [1, heads, T, width]. rotated: rotated and scaled, [1, heads, T, width].
        x: what the layer takes, [1, T, H]. low_rank: what queries are made of, [1, T, low rank].
    """

    offset: int
    plain: mx.array
    rotated: mx.array
    x: mx.array
    low_rank: mx.array

    @property
    def count(self) -> int:
        """T."""
        return self.x.shape[1]

    def part(self, start: int, end: int) -> Queries:
        """Some of them."""
        return Queries(
            self.offset + start,
            self.plain[:, :, start:end],
            self.rotated[:, :, start:end],
            self.x[:, start:end],
            self.low_rank[:, start:end],
        )


def causal(queries: Queries) -> mx.array:
    """Which positions each query may see, bool [T, offset + T]."""
    end = queries.offset + queries.count
    return mx.arange(end)[None] <= mx.arange(queries.offset, end)[:, None]


class LatentAttention:
    """What goes before mlx-lm's attention layers of this kind, and computes in their stead.

    A row's buffer holds rotated keys, and whatever a family puts beside them, as keys and latents as values.
    """

    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    kv_lora_rank: int
    scale: float
    rope: Any
    embed_q: Any
    unembed_out: Any
    kv_a_proj_with_mqa: Any
    kv_a_layernorm: Any
    o_proj: Any

    def __call__(self, x: mx.array, _: Mask, cache: RowCache) -> mx.array:
        """x [1, T, H] -> [1, T, H]."""
        offset = cache.offset
        queries = self._queries(x, offset)
        latents, rotated = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        keys = self.kept_keys(x, self.rope(rotated[:, None], offset), offset)
        keys, latents = cache.update_and_fetch(keys, self.kv_a_layernorm(latents)[:, None])
        attend = self.attend_few if queries.count <= FEW else self._attend_many
        out = attend(queries, keys, latents).transpose(0, 2, 1, 3).reshape(1, queries.count, -1)
        projected: mx.array = self.o_proj(out)
        return projected

    def kept_keys(self, x: mx.array, rotated: mx.array, offset: int) -> mx.array:
        """What the row keeps as keys, [1, 1, T, any], of the layer's input and the rotated keys [1, 1, T, width]."""
        return rotated

    def seen(self, queries: Queries, keys: mx.array) -> mx.array | None:
        """Which of the kept keys [1, 1, S, any] each query sees, bool [T, S]; None for all."""
        return None if queries.count == 1 else causal(queries)

    def attend_few(self, queries: Queries, keys: mx.array, latents: mx.array) -> mx.array:
        """Output of all heads, [1, heads, T, value width], from kept keys and latents [1, 1, S, R]."""
        within = self.embed_q(queries.plain)
        out = self.attend(within, queries.rotated, latents, latents, keys, self.seen(queries, keys))
        unembedded: mx.array = self.unembed_out(out)
        return unembedded

    def attend(
        self,
        plain: mx.array,
        rotated: mx.array,
        plain_keys: mx.array,
        values: mx.array,
        keys: mx.array,
        seen: mx.array | None,
    ) -> mx.array:
        """Attention of queries in two parts to keys in two parts, where `seen`."""
        bias = rotated @ keys[..., : self.qk_rope_head_dim].swapaxes(-1, -2)
        if seen is not None:
            bias = mx.where(seen, bias, mx.array(mx.finfo(bias.dtype).min, bias.dtype))
        return mx.fast.scaled_dot_product_attention(plain, plain_keys, values, scale=self.scale, mask=bias)

    def _queries(self, x: mx.array, offset: int) -> Queries:
        layers: Any = self
        low_rank = x
        if "q_a_proj" in layers:
            low_rank = layers.q_a_layernorm(layers.q_a_proj(x))
        q = (layers.q_b_proj if "q_b_proj" in layers else layers.q_proj)(low_rank)
        q = q.reshape(1, x.shape[1], self.num_heads, -1).transpose(0, 2, 1, 3)
        plain, rotated = mx.split(q, [self.qk_nope_head_dim], axis=-1)
        return Queries(offset, plain, self.rope(rotated, offset) * self.scale, x, low_rank)

    def _attend_many(self, queries: Queries, keys: mx.array, latents: mx.array) -> mx.array:
        """As `attend_few`, so many queries at a time that their scores have room."""
        plain_keys, values = self.embed_q(latents, transpose=False), self.unembed_out(latents)
        step = max(SCORES // (self.num_heads * keys.shape[2]), 1)
        found = []
        for start in range(0, queries.count, step):
            part = queries.part(start, min(start + step, queries.count))
            before = slice(0, part.offset + part.count)
            near = keys[:, :, before]
            seen = self.seen(part, near)
            found.append(
                self.attend(part.plain, part.rotated, plain_keys[:, :, before], values[:, :, before], near, seen)
            )
        return mx.concatenate(found, axis=2)


def split_latent_projections(tensors: Mapping[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Each `kv_b_proj` [heads * (key width + value width), R] as the two projections that mlx-lm's layers have:
    `embed_q` [heads, R, key width] and `unembed_out` [heads, value width, R].

    Of one that is stored quantised, the values' rows stay as they are. The keys' are needed the other way round, which
    their groups do not allow: they are unpacked, so that they stay what is stored.

    Raises:
        ValueError: a shape that the config does not say.
    """
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".kv_b_proj.weight")]:
        prefix = name.removesuffix("kv_b_proj.weight")
        parts = {
            part: found.pop(prefix + "kv_b_proj." + part)
            for part in ("weight", "scales", "biases")
            if prefix + "kv_b_proj." + part in found
        }
        found |= {prefix + name: tensor for name, tensor in _split(name, parts, config).items()}
    return found


def _split(name: str, parts: Mapping[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    heads, rank = whole_number(config, "num_attention_heads"), whole_number(config, "kv_lora_rank")
    keys, values = whole_number(config, "qk_nope_head_dim"), whole_number(config, "v_head_dim")
    rows, width = parts["weight"].shape
    if rows != heads * (keys + values) or ("scales" not in parts and width != rank):
        raise ValueError(f"{name} has shape {[rows, width]}, not {[heads * (keys + values), rank]}")
    if "scales" in parts and "biases" not in parts:
        raise ValueError(f"{name} is quantised without biases; of a layer that is split, only affine formats are read")
    by_head = {part: tensor.reshape(heads, keys + values, -1) for part, tensor in parts.items()}
    of_keys = {part: tensor[:, :keys] for part, tensor in by_head.items()}
    dense = _unpacked(**of_keys, columns=rank) if "scales" in parts else of_keys["weight"]
    return {
        "embed_q.weight": mx.contiguous(dense.swapaxes(-1, -2)),
        **{f"unembed_out.{part}": mx.contiguous(tensor[:, keys:]) for part, tensor in by_head.items()},
    }


def _unpacked(weight: mx.array, scales: mx.array, biases: mx.array, columns: int) -> mx.array:
    bits, group = weight.shape[-1] * 32 // columns, columns // scales.shape[-1]
    return mx.dequantize(weight, scales, biases, group_size=group, bits=bits)
