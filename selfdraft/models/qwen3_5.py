"""Qwen3.5 / 3.6: GatedDeltaNet and gated full attention, with a one-layer MTP head. Registers the dense ones.

Wiring of the head (transformers and vLLM name it `mtp`): entry i is
fc(concat[pre_fc_norm_embedding(embed(t_i)), pre_fc_norm_hidden(h_{i-1})]), one full-attention decoder layer,
then `norm`; embedding and output projection are the trunk's. Deeper drafts feed the head's own normed output.
Families whose layers have experts in place of a dense MLP (`qwen3_5_moe.py`, `qwen3_next.py`) say how one is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3_next import Qwen3NextMLP

from ..errors import CheckpointError
from ..state import Captured, CapturedLayer, KeyValues, KeyValueShape, RecurrentState, RowState, StateShape, stacked
from .base import Architecture, register
from .block_part import qwen3_5_part
from .config import positive_number, whole_number
from .draft_projection import Projecting
from .few_rows import Entrance, GatedMLP, Normed, joined
from .few_tokens import FewTokens
from .layers import AttentionArgs, DeltaArgs, GatedAttention, GatedDeltaNet
from .multimodal_rope import Rotation, multimodal_rope
from .spliced import Spliced
from .transformer import RECURRENT_DEPTH

__all__ = ["Experts", "Qwen35", "Qwen35Args", "assemble", "canonical", "tower", "zero_centred"]

_TOWER = re.compile(r"(model\.)?(visual|vision_tower|vision_model)\.")
_WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Experts:
    """Experts in place of dense MLPs, in the head too.

    Attributes:
        make: makes such an MLP.
        dense_layers: layers of the trunk that have a dense one all the same.
    """

    make: Callable[[], nn.Module]
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Qwen35Args:
    """The part of a text config that decides shapes.

    Attributes:
        intermediate_size: of dense MLPs; 0 where there are none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    norm_eps: float
    tied: bool
    context_length: int
    attention: AttentionArgs
    delta: DeltaArgs
    experts: Experts | None = None

    @staticmethod
    def from_config(config: Mapping[str, Any], experts: Experts | None = None) -> Qwen35Args:
        """Read a text config (flat, or the `text_config` of a nested one).

        Raises:
            CheckpointError: a field is missing or has no supported value, by name.
        """
        for name in _WHOLE_NUMBERS:
            value = config.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"config.json: {name} must be a positive whole number, not {value!r}")
        dense = experts is None or bool(experts.dense_layers)
        intermediate_size = whole_number(config, "intermediate_size") if dense else 0
        try:
            return _args(config, intermediate_size, experts)
        except KeyError as error:
            raise CheckpointError(
                f"config.json lacks {error.args[0]!r}, which a {config.get('model_type')!r} model needs"
            ) from error
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"config.json: a field has a value of the wrong kind ({error})") from error


def _args(config: Mapping[str, Any], intermediate_size: int, experts: Experts | None) -> Qwen35Args:
    layers = config["num_hidden_layers"]
    interval = config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)
    ]
    if len(types) != layers or not set(types) <= {"full_attention", "linear_attention"}:
        raise CheckpointError(f"config.json: layer_types {types!r} does not describe {layers} layers of known types")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("type", rope.get("rope_type", "default"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000_000))
    positive_number({"rope_theta": theta}, "rope_theta")
    positive_number({"partial_rotary_factor": rotary}, "partial_rotary_factor", most=1)
    context = config.get("max_position_embeddings", 32768)
    attention = AttentionArgs(
        hidden_size=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        bias=bool(config.get("attention_bias", False)),
        norm_eps=float(config["rms_norm_eps"]),
        rope_dims=int(head_dim * rotary),
        rope_theta=theta,
        rope_scaling=rope,
        context_length=context,
    )
    delta = DeltaArgs(
        hidden_size=config["hidden_size"],
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        taps=config["linear_conv_kernel_dim"],
        norm_eps=config["rms_norm_eps"],
    )
    return Qwen35Args(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=intermediate_size,
        layer_types=tuple(types),
        norm_eps=config["rms_norm_eps"],
        tied=bool(config.get("tie_word_embeddings", False)),
        context_length=context,
        attention=attention,
        delta=delta,
        experts=experts,
    )


def _mlp(args: Qwen35Args, index: int | None) -> Any:
    if args.experts is None or index in args.experts.dense_layers:
        return Qwen3NextMLP(args.hidden_size, args.intermediate_size)
    return args.experts.make()


class DecoderLayer(nn.Module):
    """Pre-norm residual block around one mixer and an MLP, dense or of experts.

    Args:
        index: of a layer of the trunk; None in the head.
    """

    def __init__(self, args: Qwen35Args, kind: str, index: int | None) -> None:
        super().__init__()
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(args.delta)
        else:
            self.self_attn = GatedAttention(args.attention)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)
        self.mlp = _mlp(args, index)

    def join(self) -> None:
        """Put gate and up projection of a dense MLP together, if they can be."""
        if not isinstance(self.mlp, Qwen3NextMLP):
            return
        if (whole := joined([self.mlp.gate_proj, self.mlp.up_proj])) is not None:
            self.mlp = GatedMLP(whole, self.mlp.down_proj)

    def attend(
        self, x: mx.array, rows: Sequence[KeyValues], offsets: Sequence[int], positions: Sequence[int] | Rotation
    ) -> mx.array:
        """A full-attention layer."""
        return self._finish(self.self_attn(self.input_layernorm(x), rows, offsets, positions, x))

    def recur(self, x: mx.array, state: RecurrentState, keep_steps: bool) -> tuple[mx.array, CapturedLayer]:
        """A GatedDeltaNet layer."""
        mixed, captured = self.linear_attn(self.input_layernorm(x), state, keep_steps, x)
        return self._finish(mixed), captured

    @property
    def entrance(self) -> Entrance:
        """Where few tokens come in."""
        return self.input_layernorm, self.linear_attn.in_proj if "linear_attn" in self else self.self_attn.qkv_proj

    def attend_few(
        self,
        x: mx.array,
        normed: Normed,
        buffers: Sequence[tuple[mx.array, mx.array]],
        starts: mx.array,
        rope_deltas: mx.array,
        ends: mx.array,
        following: Entrance | None,
    ) -> tuple[mx.array, Normed | None]:
        """A full-attention layer of few tokens, see `GatedAttention.few`.

        Args:
            normed: x behind the layer's norm. following: of the layer that follows.

        Returns:
            The output, and that behind the norm that follows.
        """
        mixed = self.self_attn.few(normed, buffers, starts, rope_deltas, ends, x, self._middle)
        return self._finish_few(*mixed, following)

    def recur_few(
        self, x: mx.array, normed: Normed, state: RecurrentState, counts: mx.array, following: Entrance | None
    ) -> tuple[mx.array, Normed | None, CapturedLayer]:
        """A GatedDeltaNet layer of few tokens, see `GatedDeltaNet.few`; the rest as of `attend_few`."""
        mixed, inner, captured = self.linear_attn.few(normed, state, counts, x, self._middle)
        return *self._finish_few(mixed, inner, following), captured

    @property
    def _middle(self) -> Entrance:
        return self.post_attention_layernorm, self.mlp.gate_up_proj if isinstance(self.mlp, GatedMLP) else None

    def _finish_few(
        self, x: mx.array, normed: Normed | None, following: Entrance | None
    ) -> tuple[mx.array, Normed | None]:
        assert normed is not None
        if isinstance(self.mlp, GatedMLP):
            return self.mlp.few(normed, x, following)
        out: mx.array = x + self.mlp(normed)
        return out, following[0](out) if following else None

    def _finish(self, x: mx.array) -> mx.array:
        normed = self.post_attention_layernorm(x)
        out: mx.array = self.mlp(normed, x) if isinstance(self.mlp, GatedMLP) else x + self.mlp(normed)
        return out


class Trunk(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, args: Qwen35Args) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, kind, index) for index, kind in enumerate(args.layer_types)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)
        rope = args.attention
        self.multimodal_rope = multimodal_rope(rope.rope_dims, rope.rope_theta, rope.rope_scaling)
        self._few: FewTokens | None = None

    def join(self) -> None:
        """Called once the projections of the layers were put together."""
        self._few = FewTokens(self.layers, self.embed_tokens, self.norm)

    def takes(self, rows: Sequence[RowState], tokens: int) -> bool:
        """Whether kernels take the next `tokens` tokens of such rows."""
        shape = len(rows), tokens
        return self._few is not None and self._few.fits(shape, stacked(rows), self.norm.weight.dtype)

    def __call__(
        self, tokens: mx.array, rows: Sequence[RowState], keep_steps: bool, spliced: Spliced | None, **unread: Any
    ) -> tuple[mx.array, Captured]:
        offsets = [row.length for row in rows]
        captured, states = Captured(), stacked(rows)
        dtype = self.norm.weight.dtype
        if keep_steps and spliced is None and self._few and self._few.fits(tokens.shape, states, dtype):
            buffers = list(zip(*(row.attention for row in rows), strict=True))
            places = offsets, [row.rope_delta for row in rows]
            out, captured.layers = self._few([tokens], states, buffers, *places, tokens.shape[1], dtype, **unread)
            return out, captured
        assert not unread, "only kernels take lengths that the host does not know"
        x = self.embedded(tokens, spliced)
        positions = self.positions(rows, offsets, spliced)
        attention = 0
        for layer in self.layers:
            if "linear_attn" in layer:
                x, kept = layer.recur(x, states[len(captured.layers)], keep_steps)
                captured.layers.append(kept)
            else:
                x = layer.attend(x, [row.attention[attention] for row in rows], offsets, positions)
                attention += 1
        return self.norm(x), captured

    def embedded(self, tokens: mx.array, spliced: Spliced | None) -> mx.array:
        """Embeddings [B, T, H] of tokens, with what is spliced into them."""
        x: mx.array = self.embed_tokens(tokens)
        return x if spliced is None else spliced.into(x)

    def positions(
        self, rows: Sequence[RowState], offsets: Sequence[int], spliced: Spliced | None
    ) -> Sequence[int] | Rotation:
        """Rotary positions, as `GatedAttention` takes them, of tokens whose entries begin at `offsets`."""
        if spliced is not None:
            assert self.multimodal_rope is not None
            return self.multimodal_rope.at(spliced.positions)
        return [offset + row.rope_delta for row, offset in zip(rows, offsets, strict=True)]


class Head(nn.Module):
    """The MTP head; one decoder layer, fed with embeddings by the caller."""

    def __init__(self, args: Qwen35Args) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)
        self.fc = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)
        self.layers = [DecoderLayer(args, "full_attention", None)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)
        self._few: FewTokens | None = None

    def join(self) -> None:
        """Called once the projections of the layer were put together."""
        self._few = FewTokens(self.layers, self._pairs, self.norm)

    def takes(self, rows: Sequence[RowState], tokens: int) -> bool:
        """Whether kernels take pairs of so many tokens."""
        return self._few is not None and self._few.fits((len(rows), tokens), (), self.norm.weight.dtype)

    def __call__(
        self,
        embeddings: mx.array,
        hidden: mx.array,
        rows: Sequence[RowState],
        offsets: Sequence[int],
        positions: Sequence[int] | Rotation,
        **unread: Any,
    ) -> mx.array:
        dtype = self.norm.weight.dtype
        alike = embeddings.dtype == hidden.dtype == dtype
        plain = not isinstance(positions, Rotation)
        if self._few and plain and alike and self._few.fits(embeddings.shape[:2], (), dtype):
            buffers = list(zip(*(row.head for row in rows), strict=True))
            places = offsets, [row.rope_delta for row in rows]
            return self._few([embeddings, hidden], (), buffers, *places, embeddings.shape[1], dtype, **unread)[0]
        assert not unread, "only kernels take offsets that the host does not know"
        x = self._pairs(embeddings, hidden)
        for index, layer in enumerate(self.layers):
            x = layer.attend(x, [row.head[index] for row in rows], offsets, positions)
        out: mx.array = self.norm(x)
        return out

    def _pairs(self, embeddings: mx.array, hidden: mx.array) -> mx.array:
        both = mx.concatenate([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], axis=-1)
        out: mx.array = self.fc(both)
        return out


class Qwen35(Projecting, nn.Module):
    """Implements `selfdraft.models.Model`."""

    def __init__(self, args: Qwen35Args, with_head: bool) -> None:
        super().__init__()
        self.args = args
        self.model = Trunk(args)
        if not args.tied:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        if with_head:
            self.mtp = Head(args)
        self.vocab_size = args.vocab_size
        self.context_length = args.context_length
        self.max_depth = RECURRENT_DEPTH if with_head else 0

    def new_state(self) -> RowState:
        return RowState(self._state_shape())

    def row_bytes(self, tokens: int) -> int:
        return self._state_shape().row_bytes(tokens, self.max_depth)

    def working_bytes(self, tokens: int, length: int) -> int:
        args, size = self.args, self.model.norm.weight.dtype.size
        values = args.delta.value_heads * args.delta.value_dim
        # Residual, norm and output; then an MLP's three, or what the delta rule makes of its inputs, in fp32.
        delta, mlp = 4 * 6 * (args.delta.channels + values), 3 * size * args.intermediate_size
        # Scores of all heads, which no library kernel for heads of 256 spares, and a mask (docs/log.md: measured).
        scores = tokens * length * (5 * size * args.attention.heads // 4 + 4)
        return tokens * (4 * size * args.hidden_size + max(delta, mlp)) + scores

    def _state_shape(self) -> StateShape:
        recurrent = self.args.layer_types.count("linear_attention")
        delta, attention = self.args.delta, self.args.attention
        layer = KeyValueShape(attention.kv_heads, attention.head_dim, attention.head_dim)
        return StateShape(
            attention=(layer,) * (len(self.args.layer_types) - recurrent),
            head=(layer,) * (len(self.mtp.layers) if self.max_depth else 0),
            dtype=self.model.norm.weight.dtype,
            recurrent_layers=recurrent,
            window=(delta.taps - 1, delta.channels),
            memory=(delta.value_heads, delta.value_dim, delta.key_dim),
        )

    def forward(
        self,
        tokens: mx.array,
        rows: Sequence[RowState],
        *,
        keep_steps: bool,
        spliced: Spliced | None = None,
        **unread: Any,
    ) -> tuple[mx.array, Captured]:
        hidden, captured = self.model(tokens, rows, keep_steps, spliced, **unread)
        return hidden, captured

    def runs_ahead(self, rows: Sequence[RowState], tokens: int) -> bool:
        """See `base.runs_ahead`."""
        if self.max_depth == 0 or self.mtp.norm.weight.dtype != self.model.norm.weight.dtype:
            return False
        return self.model.takes(rows, tokens) and self.mtp.takes(rows, tokens)

    @property
    def takes_pictures(self) -> bool:
        """Whether `forward` and `draft` take `spliced`."""
        return self.model.multimodal_rope is not None

    def output_layer(self) -> Any:
        return self.model.embed_tokens if self.args.tied else self.lm_head

    def draft(
        self,
        tokens: mx.array,
        hidden: mx.array,
        rows: Sequence[RowState],
        offsets: Sequence[int],
        step: int = 0,
        spliced: Spliced | None = None,
        **unread: Any,
    ) -> mx.array:
        positions = self.model.positions(rows, offsets, spliced)
        out: mx.array = self.mtp(self.model.embedded(tokens, spliced), hidden, rows, offsets, positions, **unread)
        return out


def canonical(name: str, _: Mapping[str, Any]) -> str | None:
    """Our name of a checkpoint's tensor; None for the parts of a multimodal checkpoint that are not text."""
    if _TOWER.match(name):
        return None
    name = re.sub(r"^(model\.language_model|language_model\.model)\.(?=mtp\.)", "", name)
    name = re.sub(r"^(model|language_model)\.(?=mtp\.)", "", name)
    if name.startswith("mtp."):
        return name
    name = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name)
    return re.sub(r"^language_model\.(?=lm_head\.)", "", name)


def tower(name: str) -> str | None:
    """mlx-vlm's name of a vision tower's tensor; None for any other."""
    found = _TOWER.match(name)
    return name[found.end() :] if found else None


def zero_centred(name: str) -> bool:
    """Norms that Hugging Face stores as w with an effective weight of 1 + w (not the gated one in linear_attn)."""
    if name.endswith("linear_attn.norm.weight"):
        return False
    return name.endswith("norm.weight") or name.startswith("mtp.pre_fc_norm_")


def assemble(tensors: dict[str, mx.array], _: Mapping[str, Any]) -> dict[str, mx.array]:
    """conv1d.weight: Hugging Face [C, 1, k] -> MLX [C, k, 1]."""
    return {
        name: tensor.swapaxes(1, 2) if name.endswith("conv1d.weight") and tensor.shape[-1] != 1 else tensor
        for name, tensor in tensors.items()
    }


register(
    Architecture(
        model_types=("qwen3_5", "qwen3_5_text"),
        build=lambda config, with_head: Qwen35(Qwen35Args.from_config(config), with_head),
        canonical=canonical,
        verified="trunk: transformers; head: its published formula on transformers' layers; a trained checkpoint",
        tower=tower,
        assemble=assemble,
        zero_centred=zero_centred,
        sharding=qwen3_5_part,
    )
)
