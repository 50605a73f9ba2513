"""Gemma 4 and its assistant, a small checkpoint of its own that reads the trunk's keys and values.

The assistant's layers have queries alone. With [embedding; hidden] of a pair (h_{i-1}, t_i), projected, they attend
from position i to what the trunk's last full and last sliding layer with keys of its own hold of positions 0..i-1; each
further draft does the same from the same position, with what the assistant put out in place of the hidden. It keeps
nothing, so that nothing of it has to be rolled back. (transformers: `gemma4_assistant` and
`SinglePositionMultiTokenCandidateGenerator`.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text
from mlx_lm.models.gemma4_text import ModelArgs, logit_softcap

from ..errors import CheckpointError
from ..state import Captured, KeyValues, KeyValueShape, RowState
from .base import COMPANION, Architecture, register
from .config import check_kinds, layer_args, positive_number, whole_number
from .experts import stack_experts
from .row_cache import Mask, RowCache
from .transformer import RECURRENT_DEPTH, Shape, Transformer

__all__ = ["Gemma4", "build"]

_WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "global_head_dim",
    "sliding_window",
    "max_position_embeddings",
)
_EXPERT_NUMBERS = ("num_experts", "top_k_experts", "moe_intermediate_size")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# What the family's configuration classes fill in; mlx-lm fills in those of one size.
_DEFAULTS = {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "tie_word_embeddings": True,
}
_UNIFIED = {**_DEFAULTS, "hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144}


class ReadCache:
    """Keys and values that another layer writes, in the place of a cache.

    Args:
        held: the other layer's.
        offset: position of the newest key that the first query sees.
        behind: how many positions queries stand behind the newest key that they see.
        length: how many positions are held; queries whose keys are not are answered with what there is.
    """

    def __init__(self, held: KeyValues, offset: int, *, behind: int, length: int) -> None:
        self.offset = offset + behind
        self._held, self._newest, self._length = held, offset, length

    def fetch(self, tokens: int) -> tuple[mx.array, mx.array]:
        """All that so many queries see."""
        return self._held.between(*self._range(tokens))

    def mask(self, tokens: int) -> Mask:
        """See `RowCache.mask`."""
        begin, end = self._range(tokens)
        if tokens == 1:
            return None
        if self._held.window is None and end == self._newest + tokens:
            return "causal"
        queries = mx.arange(tokens)[:, None]
        keys = mx.arange(begin, end)[None]
        seen = keys <= queries + self._newest
        return seen if self._held.window is None else seen & (keys > queries + self.offset - self._held.window)

    def _range(self, tokens: int) -> tuple[int, int]:
        begin, end = self._held.begin(self.offset), min(self._newest + tokens, self._length)
        assert begin < end, "the trunk runs, and is committed, before anybody reads its keys"
        return begin, end


class Attention(gemma4_text.Attention):  # type: ignore[misc]
    """mlx-lm's, row by row: over a `RowCache` a row, or a `ReadCache` where the layer has no keys of its own."""

    def __call__(
        self, x: mx.array, mask: None, cache: Sequence[Any], shared_kv: None = None, offset: None = None
    ) -> tuple[mx.array, None, None]:
        rows, tokens = [], x.shape[1]
        for index, each in enumerate(cache):
            row, mask = x[index : index + 1], each.mask(tokens)
            if self.has_kv:
                rows.append(super().__call__(row, mask, each)[0])
            else:
                rows.append(super().__call__(row, mask, shared_kv=each.fetch(tokens), offset=each.offset)[0])
        return mx.concatenate(rows) if len(rows) > 1 else rows[0], None, None


class Trunk(gemma4_text.Gemma4TextModel):  # type: ignore[misc]
    """mlx-lm's, over rows of ours."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.layers = _layers(args)

    def __call__(self, tokens: mx.array, rows: Sequence[RowState]) -> mx.array:
        embeddings = self.embed_tokens(tokens)
        x = embeddings * self.embed_scale
        inputs = None
        if self.hidden_size_per_layer_input:
            inputs = self._project_per_layer_inputs(x, self._get_per_layer_inputs(tokens, embeddings))
        for index, (layer, source) in enumerate(zip(self.layers, self.previous_kvs, strict=True)):
            caches = [_cache(row, source, tokens.shape[1], own=layer.self_attn.has_kv) for row in rows]
            x, _, _ = layer(x, None, caches, per_layer_input=None if inputs is None else inputs[:, :, index])
        out: mx.array = self.norm(x)
        return out


def _layers(args: ModelArgs) -> list[Any]:
    layers = [gemma4_text.DecoderLayer(args, index) for index in range(args.num_hidden_layers)]
    for index, layer in enumerate(layers):
        layer.self_attn = Attention(args, index)
    return layers


def _cache(row: RowState, source: int, tokens: int, *, own: bool) -> RowCache | ReadCache:
    if own:
        return RowCache(row.attention[source], row.length)
    return ReadCache(row.attention[source], row.length, behind=0, length=row.length + tokens)


class Centroids(nn.Module):
    """Which tokens the smaller assistants score: those of the clusters whose centroids fit best."""

    def __init__(self, size: int, vocab_size: int, count: int, chosen: int) -> None:
        super().__init__()
        self.centroids = nn.Linear(size, count, bias=False)
        self.token_ordering = mx.zeros(vocab_size, dtype=mx.int64)
        self._count, self._chosen = count, chosen

    def __call__(self, x: mx.array) -> mx.array:
        """x [B, T, h] -> ids [B, T, n]."""
        scores = self.centroids(x)
        best = mx.argpartition(-scores, kth=self._chosen - 1, axis=-1)[..., : self._chosen]
        clusters = self.token_ordering.reshape(self._count, -1)
        return clusters[best].flatten(-2)


class Layers(nn.Module):
    """The assistant's embedding, which is its output projection, its layers, and its norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = _layers(args)
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)


class Assistant(nn.Module):
    """The assistant. What it hands out is as its output projection takes it; `post_projection` makes it a hidden.

    Args:
        width: H, of the trunk.
        sources: type of a layer -> the trunk's layer whose keys and values it reads.
    """

    def __init__(
        self, args: ModelArgs, width: int, sources: Mapping[str, int], centroids: Centroids | None = None
    ) -> None:
        super().__init__()
        self.pre_projection = nn.Linear(2 * width, args.hidden_size, bias=False)
        self.post_projection = nn.Linear(args.hidden_size, width, bias=False)
        self.model = Layers(args)
        if centroids is not None:
            self.masked_embedding = centroids
        self._sources = dict(sources)

    def draft(
        self, embeddings: mx.array, hidden: mx.array, rows: Sequence[RowState], offsets: Sequence[int], step: int
    ) -> mx.array:
        """See `Model.draft`; embeddings [B, W, H] of its tokens, scaled. The output is [B, W, h]."""
        if step:
            hidden = self.post_projection(hidden)
        x = self.pre_projection(mx.concatenate([embeddings, hidden], axis=-1))
        for layer in self.model.layers:
            source = self._sources[layer.layer_type]
            caches = [
                ReadCache(row.attention[source], offset - step, behind=1, length=row.length)
                for row, offset in zip(rows, offsets, strict=True)
            ]
            x, _, _ = layer(x, None, caches)
        out: mx.array = self.model.norm(x)
        return out

    def logits(self, x: mx.array, *, whole: bool) -> mx.array:
        """[B, T, h] -> [B, T, V]; -inf for tokens of clusters that are not scored, unless `whole`."""
        embedding = self.model.embed_tokens
        if whole or "masked_embedding" not in self:
            out: mx.array = embedding.as_linear(x)
            return out
        tokens = self.masked_embedding(x)
        found = (embedding(tokens) @ x[..., None]).squeeze(-1)
        blank = mx.full((*x.shape[:-1], embedding.weight.shape[0]), -mx.inf, dtype=found.dtype)
        return mx.put_along_axis(blank, tokens, found, axis=-1)


class Gemma4(Transformer):
    """Implements `selfdraft.models.Model`."""

    def __init__(self, shape: Shape, trunk: Trunk, assistant: Assistant | None, softcap: float | None) -> None:
        super().__init__(shape, trunk, assistant)
        self._softcap = softcap

    def forward(self, tokens: mx.array, rows: Sequence[RowState], *, keep_steps: bool) -> tuple[mx.array, Captured]:
        return self.model(tokens, rows), Captured()

    def logits(self, hidden: mx.array) -> mx.array:
        logits = super().logits(hidden)
        if self._softcap is None:
            return logits
        capped: mx.array = logit_softcap(self._softcap, logits)
        return capped

    def draft(
        self, tokens: mx.array, hidden: mx.array, rows: Sequence[RowState], offsets: Sequence[int], step: int = 0
    ) -> mx.array:
        embeddings = self.model.embed_tokens(tokens) * self.model.embed_scale
        out: mx.array = self.mtp.draft(embeddings, hidden, rows, offsets, step)
        return out

    def draft_only(self, tokens: Sequence[int] | None) -> int:
        """The assistant's output projection is its own, and small: all it scores is drafted from."""
        return 0

    def draft_logits(self, hidden: mx.array, step: int = 0, *, whole: bool = False) -> mx.array:
        out: mx.array = self.mtp.logits(hidden, whole=whole)
        return out


def build(config: Mapping[str, Any], with_head: bool) -> Gemma4:
    """A model of a text config."""
    args = _args(config)
    own = args.layer_types[: max(args.num_hidden_layers - args.num_kv_shared_layers, 0)]
    if not set(args.layer_types) <= set(own):
        raise CheckpointError(
            f"config.json: num_kv_shared_layers {args.num_kv_shared_layers} leaves no layer with keys of each type"
        )
    trunk = Trunk(args)
    shape = Shape(
        vocab_size=args.vocab_size,
        context_length=args.max_position_embeddings,
        heads=args.num_attention_heads,
        # Layers without keys of their own may be twice as wide.
        inner=2 * args.intermediate_size + (args.top_k_experts or 0) * (args.moe_intermediate_size or 0),
        layers=tuple(_kept(layer, args) for layer in trunk.layers if layer.self_attn.has_kv),
        max_depth=RECURRENT_DEPTH,
        tied=args.tie_word_embeddings,
    )
    return Gemma4(shape, trunk, _assistant(config, args, trunk) if with_head else None, args.final_logit_softcapping)


def _kept(layer: Any, args: ModelArgs) -> KeyValueShape:
    attention = layer.self_attn
    window = args.sliding_window if attention.is_sliding else None
    return KeyValueShape(attention.n_kv_heads, attention.head_dim, attention.head_dim, window)


def _args(config: Mapping[str, Any]) -> ModelArgs:
    defaults = _UNIFIED if "unified" in str(config.get("model_type")) else _DEFAULTS
    given = {**defaults, **config}
    layers = whole_number(given, "num_hidden_layers")
    whole_number(given, "num_kv_shared_layers", least=0)
    if not given.get("layer_types"):
        given["layer_types"] = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)]
    types = given["layer_types"]
    if not isinstance(types, list) or len(types) != layers or not set(types) <= _LAYER_TYPES:
        raise CheckpointError(f"config.json: layer_types {types!r} does not describe {layers} layers of known types")
    positive_number(given, "rms_norm_eps")
    if given["final_logit_softcapping"] is not None:
        positive_number(given, "final_logit_softcapping")
    shared = ("num_global_key_value_heads",) if given["num_global_key_value_heads"] is not None else ()
    experts = _EXPERT_NUMBERS if given["enable_moe_block"] else ()
    args = layer_args(ModelArgs, given, (*_WHOLE_NUMBERS, *shared, *experts))
    check_kinds(args, but=("final_logit_softcapping", "pad_token_id"))
    if experts and (args.top_k_experts or 0) > (args.num_experts or 0):
        raise CheckpointError(f"config.json: top_k_experts is more than the {args.num_experts} experts")
    return args


def _assistant(config: Mapping[str, Any], target: ModelArgs, trunk: Trunk) -> Assistant:
    """The assistant that stands beside a trunk.

    Raises:
        CheckpointError: there is none, or its layers cannot read this trunk's keys and values.
    """
    own = config.get(COMPANION)
    text = own.get("text_config") if isinstance(own, Mapping) else None
    if not isinstance(own, Mapping) or not isinstance(text, Mapping):
        raise CheckpointError("the assistant's config.json is missing or has no text_config")
    fixed = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}
    layers = whole_number(text, "num_hidden_layers")
    args = _args({**text, **fixed, "num_kv_shared_layers": layers})
    _must_equal("backbone_hidden_size", own.get("backbone_hidden_size"), "hidden_size", target.hidden_size)
    _must_equal("vocab_size", args.vocab_size, "vocab_size", target.vocab_size)
    sources = {kind: _source(kind, trunk) for kind in args.layer_types}
    for layer in _layers(args):
        asks, read = layer.self_attn, trunk.layers[sources[layer.layer_type]].self_attn
        _must_equal(f"head size of {layer.layer_type}", asks.head_dim, "head size", read.head_dim)
        if asks.n_heads % read.n_kv_heads:
            raise CheckpointError(
                f"the assistant is of another model: {asks.n_heads} heads share {read.n_kv_heads} keys"
            )
    return Assistant(args, target.hidden_size, sources, _centroids(own, args))


def _must_equal(name: str, value: object, of_trunk: str, wanted: object) -> None:
    if value != wanted:
        raise CheckpointError(
            f"the assistant is of another model: its {name} is {value}, this model's {of_trunk} {wanted}"
        )


def _source(kind: str, trunk: Trunk) -> int:
    """The trunk's last layer of a type that has keys and values of its own."""
    found = [i for i, layer in enumerate(trunk.layers) if layer.self_attn.has_kv and layer.layer_type == kind]
    if not found:
        raise CheckpointError(f"the assistant is of another model: this one has no {kind} to read")
    return found[-1]


def _centroids(own: Mapping[str, Any], args: ModelArgs) -> Centroids | None:
    if not own.get("use_ordered_embeddings", False):
        return None
    count = whole_number(own, "num_centroids", default=2048)
    chosen = whole_number(own, "centroid_intermediate_top_k", default=32)
    if args.vocab_size % count or chosen > count:
        raise CheckpointError(
            f"the assistant's config.json: num_centroids {count} must divide vocab_size {args.vocab_size}, and "
            f"centroid_intermediate_top_k {chosen} be no more"
        )
    return Centroids(args.hidden_size, args.vocab_size, count, chosen)


_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|audio_tower|embed_audio|embed_vision|vision_embedder)\."
)
_UNUSED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..+")


def _canonical(name: str, config: Mapping[str, Any]) -> str | None:
    if _OTHER_PARTS.match(name):
        return None
    name = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name)
    name = re.sub(r"^language_model\.(?=lm_head\.)", "", name)
    layers = whole_number(config, "num_hidden_layers")
    shared = whole_number(config, "num_kv_shared_layers", least=0, default=0)
    # Layers that read another's keys are stored with projections of their own, too.
    if (found := _UNUSED.fullmatch(name)) and int(found.group(1)) >= layers - shared:
        return ""
    return name


def _assemble(tensors: dict[str, mx.array], _: Mapping[str, Any]) -> dict[str, mx.array]:
    found = stack_experts(tensors, into="experts.switch_glu")
    found.pop("mtp.lm_head.weight", None)  # a copy of the assistant's embedding
    return found


register(
    Architecture(
        model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        build=build,
        canonical=_canonical,
        assemble=_assemble,
        companion="-assistant",
        companion_types=("gemma4_assistant", "gemma4_unified_assistant"),
        verified="trunk and assistant: transformers",
    )
)
