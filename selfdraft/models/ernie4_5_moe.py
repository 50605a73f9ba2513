"""ERNIE-4.5 with experts: grouped attention, experts chosen with a correction bias, one MTP module for one step.

The module is stored beside the layers: `mtp_emb_norm.0`, `mtp_hidden_norm.0`, `mtp_linear_proj.0` over [embedding;
hidden], and a dense decoder layer `mtp_block.0`. It has no norm of its own: FastDeploy, by the model's makers, puts its
output behind the trunk's final norm (`ernie4_5_mtp.py`), and so does the training code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.ernie4_5_moe import Ernie4_5_DecoderLayer, Ernie4_5_MLP, Ernie4_5_MoeMLP, ModelArgs

from ..errors import CheckpointError
from ..state import KeyValueShape
from .base import Architecture, register
from .config import layer_args, positive_number, whole_number, with_rope
from .experts import stack_experts
from .mtp_modules import ModuleArgs
from .transformer import Shape, Transformer, Trunk

__all__ = ["build"]

_WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "moe_num_experts",
    "moe_k",
    "moe_layer_interval",
)
# What the family's configuration class fills in.
_DEFAULTS = {
    "use_bias": False,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_num_shared_experts": 2,
}
_MODULE = re.compile(r"model\.mtp_(emb_norm|hidden_norm|linear_proj|block)\.(\d+)\.(.+)")
_PARTS = {"emb_norm": "enorm", "hidden_norm": "hnorm", "linear_proj": "eh_proj", "block": "block"}
_BIAS = "mlp.e_score_correction_bias"


class Experts(Ernie4_5_MoeMLP):  # type: ignore[misc]
    """mlx-lm's, with the bias that decides which experts are taken; they are weighted without it."""

    def __init__(self, args: ModelArgs, least_sum: float) -> None:
        super().__init__(args)
        self.e_score_correction_bias = mx.zeros(args.moe_num_experts)
        self._least_sum = least_sum

    def __call__(self, x: mx.array) -> mx.array:
        scores = mx.softmax(self.gate(x.astype(mx.float32)), axis=-1)
        chosen = mx.argpartition(-(scores + self.e_score_correction_bias), kth=self.k - 1, axis=-1)[..., : self.k]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        weights = weights / mx.maximum(weights.sum(axis=-1, keepdims=True), self._least_sum)
        found = self.switch_mlp(x, chosen)
        out: mx.array = (found * weights.astype(found.dtype)[..., None]).sum(axis=-2)
        return out if self.shared_experts is None else out + self.shared_experts(x)


def build(config: Mapping[str, Any], with_head: bool) -> Transformer:
    """A model of a text config."""
    given = {**_DEFAULTS, **with_rope(config)}
    for name in ("rope_theta", "rms_norm_eps"):
        positive_number(given, name)
    args = layer_args(ModelArgs, given, _WHOLE_NUMBERS)
    if args.moe_k > args.moe_num_experts:
        raise CheckpointError(f"config.json: moe_k is more than the {args.moe_num_experts} experts")
    norm = partial(nn.RMSNorm, args.hidden_size, eps=args.rms_norm_eps)
    size = args.head_dim or args.hidden_size // args.num_attention_heads
    layer = KeyValueShape(args.num_key_value_heads, size, size)
    shape = Shape(
        vocab_size=args.vocab_size,
        context_length=args.max_position_embeddings,
        heads=args.num_attention_heads,
        inner=max(
            args.intermediate_size,
            (args.moe_k + args.moe_num_shared_experts) * (args.moe_intermediate_size or args.intermediate_size),
        ),
        layers=(layer,) * args.num_hidden_layers,
        modules=(layer,),
        max_depth=1,
        tied=args.tie_word_embeddings,
    )
    sparse = _sparse_layers(given)
    layers = [_layer(args, given, index in sparse) for index in range(args.num_hidden_layers)]
    trunk = Trunk(nn.Embedding(args.vocab_size, args.hidden_size), layers, norm())
    if not with_head:
        return Ernie(shape, trunk, None)
    return Ernie(shape, trunk, (ModuleArgs(args.hidden_size, norm, final_norm=False), [_layer(args, given, False)]))


class Ernie(Transformer):
    """With the trunk's final norm behind the module, too."""

    def draft_logits(self, hidden: mx.array, step: int = 0, *, whole: bool = False) -> mx.array:
        return super().draft_logits(self.model.norm(hidden), step, whole=whole)


def _layer(args: ModelArgs, given: Mapping[str, Any], sparse: bool) -> nn.Module:
    layer: nn.Module = Ernie4_5_DecoderLayer(args, 0)
    layer.mlp = (
        Experts(args, float(given.get("moe_norm_min", 1e-12)))
        if sparse
        else Ernie4_5_MLP(args.hidden_size, args.intermediate_size, args.use_bias)
    )
    return layer


def _sparse_layers(config: Mapping[str, Any]) -> set[int]:
    """Layers that have experts; a last one of -1 is the trunk's last."""
    interval, layers = whole_number(config, "moe_layer_interval"), whole_number(config, "num_hidden_layers")
    first = whole_number(config, "moe_layer_start_index", least=0)
    last = whole_number(config, "moe_layer_end_index", least=-1)
    last = layers - 1 if last == -1 else last
    return {index for index in range(layers) if first <= index <= last and (index + 1) % interval == 0}


def _canonical(name: str, _: Mapping[str, Any]) -> str | None:
    if found := _MODULE.fullmatch(name):
        part, module, rest = found.groups()
        return f"mtp.layers.{module}.{_PARTS[part]}.{rest}"
    return name.replace("mlp.moe_statics.e_score_correction_bias", _BIAS)


def _assemble(tensors: dict[str, mx.array], config: Mapping[str, Any]) -> dict[str, mx.array]:
    given = {**_DEFAULTS, **config}
    size, experts = whole_number(given, "hidden_size"), whole_number(given, "moe_num_experts")
    found = stack_experts(tensors)
    projection = "mtp.layers.0.eh_proj.weight"
    # ERNIE-4.5-300B-A47B-PT was released with this matrix transposed.
    if projection in found and found[projection].shape == (2 * size, size):
        found[projection] = found[projection].T
    for name in _biases(given):
        found[name] = found[name].reshape(-1) if name in found else mx.zeros(experts)
    return found


def _biases(config: Mapping[str, Any]) -> list[str]:
    return [f"model.layers.{layer}.{_BIAS}" for layer in sorted(_sparse_layers(config))]


def _remarks(tensors: Mapping[str, mx.array], config: Mapping[str, Any]) -> list[str]:
    lost = [name for name in _biases({**_DEFAULTS, **config}) if name not in tensors]
    if not lost or config.get("moe_use_aux_free") is False:
        return []
    return [
        f"{len(lost)} layers lack the bias that experts are chosen with, as in mlx-lm's conversions: other experts "
        "than the model's are taken; convert the original checkpoint anew, with its e_score_correction_bias"
    ]


register(
    Architecture(
        model_types=("ernie4_5_moe",),
        build=build,
        canonical=_canonical,
        assemble=_assemble,
        remarks=_remarks,
        verified="trunk: transformers; head: FastDeploy's formula on transformers' layers",
    )
)
