"""Synthetic models: a real shape at full cost, 4-bit words made on the device, and a planted next-token process.

Knows shapes, packed words and the process. Knows no files and no text: prompts are token ids.

Nothing here was trained. Every matrix of the real architecture is there and is read, but the output projections of
mixers and MLPs have scale 0, so the residual stream stays the newest token's embedding. Embeddings are rows of signs,
and every weight the process needs is exact on the 4-bit grid: logits are exact sums in fp32, in whatever order they are
added. (MLX's CPU kernels add in the model's dtype: there a bfloat16 model is exact in the tiny shape only.)
Two things follow. Speed is that of a real model of this shape, while acceptance is what was asked for, not what a
trained head reaches. And text that is equal at all depths proves nothing about a kernel's parity between widths: use a
real checkpoint, or weights that are all random, for that.

The process. Ids up to V - 8 come in clusters of 8 (id // 8). The code of a token is its cluster's random signs, with a
few channels for each of its three member bits. The row of the output projection for `successor[t]` is the code of t,
so behind t the logit of successor[t ^ e] is the peak less a gap for each bit of e, and all other tokens are some
standard deviations of noise above 0: the next token is the successor of t with some of its member bits flipped,
independently, and at T = 0 the successor itself. `successor` is one cycle through all of these ids. Each flip is a
permutation, so sampled text visits all tokens equally often, under any filters.

The head. It sees the same code and gives the same law (to the bit in 16-bit dtypes), but for tokens that carry the flag
of its depth: there it puts one of 8 reserved tokens, which the trunk never emits, half as high again. How deep it is,
the head tells itself in the hidden that it hands on: `fc` shifts a marker by one channel. The reserved token's row
reads one flag and one marker with equal weights: two signs, so both set give twice the weight, and one alone gives 0.
A draft is thus surely accepted or surely rejected, under every rule and at every temperature in use (from T = 2 on the
noise of a large vocabulary counts, unless top_k cuts it). Every token is an input of the head at one depth at most, and
flags are placed independently of the cycle: P(d_i stays | those before it stay) is the share of tokens without flag i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from ..errors import InvalidRequest
from ..models.block_part import qwen3_5_part
from ..models.few_rows import use_few_row_kernels
from ..models.loader import LoadedModel, quantisation_of
from ..models.qwen3_5 import Qwen35, Qwen35Args
from ..models.sharding import Ranks, install, part_of

__all__ = ["PUBLISHED_ACCEPTANCE", "SHAPES", "Planted", "Shape", "SyntheticModel", "synthetic", "tokens_per_cycle"]

# One public engine's figures for Qwen3.6-27B at depth 4, by position, each given that those before were accepted.
PUBLISHED_ACCEPTANCE = (0.976, 0.952, 0.881, 0.756)

BITS = 4
GROUP = 64
DEPTHS = 8  # as deep as any head goes; also the channels of one packed word
CLUSTER = 8
GAPS = (1.25, 1.75, 2.25)  # logits below the peak, about, of each flipped member bit: at T = 0.6 the top has 0.82
PEAK = 24.0  # the successor's logit, about

# First channels, in the last group, of the flags, of the markers of depths 1..8, and the one that marks the trunk's own
# hidden; a packed word has 8 channels.
FLAGS, MARKERS, TRUNK = 0, 8, 16

_SILENT = ("o_proj", "out_proj", "down_proj")
_SIGN = 0x88888888  # the bit that makes a nibble 12 (+1) and not 4 (-1)
_MINUS = 0x44444444
_PLUS = _MINUS | _SIGN


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a dense Qwen3.5 model with a one-layer head; embedding and output projection are not tied.

    Attributes:
        likeness: the model that has this shape, for labels.
        rotary: share of head_dim that is rotated.
        linear_dim: size of the key and value heads of linear attention.
    """

    likeness: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    linear_dim: int
    vocabulary: int
    context: int
    rotary: float = 0.25

    def config(self) -> dict[str, Any]:
        """The text config of such a checkpoint, in Hugging Face's names."""
        return {
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "full_attention_interval": 4,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.linear_dim,
            "linear_value_head_dim": self.linear_dim,
            "linear_conv_kernel_dim": 4,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "max_position_embeddings": self.context,
            "mtp_num_hidden_layers": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000_000.0,
                "partial_rotary_factor": self.rotary,
            },
        }


SHAPES: Mapping[str, Shape] = {
    # Public config.json of Qwen/Qwen3.6-27B, also in github.com/THUDM/slime, scripts/models/qwen3.5-27B.sh.
    "27b": Shape(
        likeness="Qwen3.6-27B",
        layers=64,
        hidden=5120,
        intermediate=17408,
        heads=24,
        kv_heads=4,
        head_dim=256,
        key_heads=16,
        value_heads=48,
        linear_dim=128,
        vocabulary=248_320,
        context=262_144,
    ),
    # Sizes as in apxml.com/models/qwen35-9b and awesomeagents.ai/models/qwen-3-5-9b. Not tied: so the trunk has the
    # 8.95 billion parameters that public builds of it report (tied it would have 7.9).
    "9b": Shape(
        likeness="Qwen3.5-9B",
        layers=32,
        hidden=4096,
        intermediate=12288,
        heads=16,
        kv_heads=4,
        head_dim=256,
        key_heads=16,
        value_heads=32,
        linear_dim=128,
        vocabulary=248_320,
        context=262_144,
    ),
    "tiny": Shape(
        likeness="tiny",
        layers=4,
        hidden=256,
        intermediate=64,
        heads=2,
        kv_heads=1,
        head_dim=32,
        key_heads=1,
        value_heads=2,
        linear_dim=32,
        vocabulary=1024,
        context=65_536,
    ),
}


@dataclass(frozen=True)
class Planted:
    """The process that a synthetic model follows.

    Attributes:
        acceptance: of positions 1..8, each given that those before were accepted.
        successor: the most likely token behind each, [V]; a token of the last 8 behaves like one of the first 8.
        flagged: where the head drafts wrongly, [8, V]: at depth i + 1 with this token as input.
        peak, gaps: logit of the successor, and how far each flipped member bit lowers it.
    """

    acceptance: tuple[float, ...]
    successor: npt.NDArray[np.int64]
    flagged: npt.NDArray[np.bool_]
    peak: float
    gaps: tuple[float, ...]

    @property
    def tokens(self) -> int:
        """Ids below this are what the process visits; the 8 above are the head's wrong drafts."""
        return len(self.successor) - DEPTHS

    def greedy(self, token: int, count: int) -> list[int]:
        """The `count` tokens behind `token` at T = 0."""
        out: list[int] = []
        for _ in range(count):
            token = int(self.successor[token])
            out.append(token)
        return out

    def logits(self, token: int) -> dict[int, float]:
        """Tokens that may come behind `token` and their logits, before rounding to the model's dtype."""
        inside = token % self.tokens
        return {
            int(self.successor[inside ^ flips]): self.peak
            - sum(gap for bit, gap in enumerate(self.gaps) if flips >> bit & 1)
            for flips in range(CLUSTER)
        }


@dataclass(frozen=True)
class SyntheticModel(LoadedModel):
    """A loaded model that nobody trained.

    Attributes:
        label: what to write wherever a figure of it is shown.
        shape, planted: its sizes and its process.
    """

    label: str
    shape: Shape
    planted: Planted


def tokens_per_cycle(acceptance: Sequence[float], depth: int) -> float:
    """Expected tokens of a cycle: 1 + a_1 + a_1 a_2 + ... up to `depth` conditional acceptances."""
    return 1.0 + sum(math.prod(acceptance[: i + 1]) for i in range(depth))


def synthetic(
    shape: str | Shape,
    acceptance: Sequence[float] = PUBLISHED_ACCEPTANCE,
    seed: int = 0,
    dtype: mx.Dtype = mx.bfloat16,
    ranks: Ranks | None = None,
) -> SyntheticModel:
    """Build a synthetic model on the default device; no matrix exists unquantised at any time.

    Args:
        shape: a name in SHAPES, or sizes; memory of "27b" is about 15.5 GB, of "9b" about 5.
        acceptance: conditional acceptance of positions 1, 2, ...; the last one holds for all deeper ones. Realised to
            half a token of the vocabulary.
        dtype: of scales, biases, norms and activations (bfloat16, float16 or float32).
        ranks: build this rank's part alone; it is cut out of the whole, which is there for a moment.

    Raises:
        CheckpointError: the ranks cannot share this shape.
        InvalidRequest: a shape that is not known or cannot carry the process, an acceptance outside [0, 1], none, or
            more than 8.
    """
    sizes = _known(shape)
    rates = _rates(acceptance)
    plan = _Plan.of(sizes, rates, seed)
    module: Any = Qwen35(Qwen35Args.from_config(sizes.config()), True)
    # All of this is lazy: the unquantised initial values are never computed, only their shapes are.
    nn.quantize(module, group_size=GROUP, bits=BITS)
    weights = _random_weights(dict(tree_flatten(module.parameters())), seed, dtype)
    weights.update(_planted_weights(plan, dtype))
    part = qwen3_5_part(sizes.config(), ranks.rank, ranks.size) if ranks else None
    if part:
        weights = {name: part_of(name, tensor, part.cut(name)) for name, tensor in weights.items()}
        module = Qwen35(Qwen35Args.from_config(part.config), True)
        nn.quantize(module, group_size=GROUP, bits=BITS)
    module.load_weights(list(weights.items()), strict=True)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    weights.clear()  # those that are put together are held once
    module.eval()
    quantisation = quantisation_of(module)
    if part and ranks:
        install(module, part, ranks)
    use_few_row_kernels(module)
    mx.eval(module.parameters())
    shown = "/".join(f"{100 * rate:.1f}" for rate in acceptance)
    return SyntheticModel(
        model=module,
        dtype=dtype,
        quantisation=quantisation,
        nbytes=nbytes,
        label=f"SYNTHETIC ({sizes.likeness} shape, random {BITS}-bit weights, planted acceptance {shown}%)",
        shape=sizes,
        planted=plan.planted,
    )


def _known(shape: str | Shape) -> Shape:
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise InvalidRequest(f"no synthetic shape {shape!r}; known: {', '.join(SHAPES)}", param="shape")
        shape = SHAPES[shape]
    if shape.hidden % GROUP or shape.hidden < 3 * GROUP:
        raise InvalidRequest(
            f"a hidden size of {shape.hidden} cannot carry the process: use a multiple of {GROUP} from {3 * GROUP} on",
            param="shape",
        )
    if shape.vocabulary % CLUSTER or shape.vocabulary < 4 * CLUSTER:
        raise InvalidRequest(
            f"a vocabulary of {shape.vocabulary} cannot carry the process: use a multiple of {CLUSTER} "
            f"from {4 * CLUSTER} on",
            param="shape",
        )
    return shape


def _rates(acceptance: Sequence[float]) -> tuple[float, ...]:
    """Acceptance of all depths."""
    rates = tuple(float(rate) for rate in acceptance)
    if not 1 <= len(rates) <= DEPTHS or not all(0 <= rate <= 1 for rate in rates):
        raise InvalidRequest(f"acceptance must be 1 to {DEPTHS} numbers in [0, 1]; got {rates!r}", param="acceptance")
    return rates + rates[-1:] * (DEPTHS - len(rates))


def _short(value: float) -> float:
    """The nearest number of 4 significant bits: 12 times it is still exact in bfloat16."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 16), exponent - 4)


@dataclass(frozen=True)
class _Plan:
    """What is decided on the host: the process, and where it sits in the channels.

    Attributes:
        scale: of the output projection where it reads codes: a channel adds 4 * scale times two signs.
        bit_channels: channels of each member bit; they come first.
    """

    shape: Shape
    planted: Planted
    scale: float
    bit_channels: tuple[int, ...]
    seed: int

    @staticmethod
    def of(shape: Shape, rates: tuple[float, ...], seed: int) -> _Plan:
        code = shape.hidden - GROUP
        scale = _short(PEAK / (4 * code))
        channels = tuple(round(gap / (8 * scale)) for gap in GAPS)
        rng = np.random.default_rng(seed)
        tokens = shape.vocabulary - DEPTHS
        order = rng.permutation(tokens)
        successor = np.empty(shape.vocabulary, dtype=np.int64)
        successor[order] = np.roll(order, -1)
        successor[tokens:] = successor[:DEPTHS]
        flagged = np.zeros((DEPTHS, shape.vocabulary), dtype=np.bool_)
        for depth, rate in enumerate(rates):
            flagged[depth, rng.choice(tokens, round((1 - rate) * tokens), replace=False)] = True
        planted = Planted(
            acceptance=rates,
            successor=successor,
            flagged=flagged,
            peak=4 * scale * code,
            gaps=tuple(8 * scale * count for count in channels),
        )
        return _Plan(shape, planted, scale, channels, seed)


def _words(key: mx.array, shape: Sequence[int]) -> mx.array:
    """Random uint32. In halves, because `randint` draws from fp32, which has no 32 random bits."""
    halves = mx.random.randint(0, 1 << 16, (*shape[:-1], 2 * shape[-1]), dtype=mx.uint16, key=key)
    return halves.view(mx.uint32)


def _packed(nibbles: npt.NDArray[Any]) -> mx.array:
    """Nibbles [..., 8 n] as words [..., n], in mlx's order: the first is the lowest."""
    parts = nibbles.astype(np.uint32).reshape(*nibbles.shape[:-1], -1, 8)
    shifted: npt.NDArray[np.uint32] = parts << np.arange(0, 32, 4, dtype=np.uint32)
    return mx.array(np.bitwise_or.reduce(shifted, axis=-1))


def _signs(bits: npt.NDArray[Any]) -> mx.array:
    """Bits [..., 8 n] as words of nibbles 12 (set) and 4."""
    return _packed(np.where(bits, 12, 4))


def _random_weights(parameters: Mapping[str, mx.array], seed: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Every parameter that the process does not need, evaluated one by one: outputs are of order 1, or exactly 0."""
    key = mx.random.key(seed)
    weights: dict[str, mx.array] = {}
    for path, tensor in parameters.items():
        owner, _, kind = path.rpartition(".")
        if owner in ("model.embed_tokens", "lm_head", "mtp.fc"):
            continue
        key, used = mx.random.split(key)
        inputs = tensor.shape[-1] * GROUP
        step = 0.0 if owner.endswith(_SILENT) else 1 / math.sqrt(21.25 * inputs)  # 21.25: variance of 0..15
        if tensor.dtype == mx.uint32:
            value = _words(used, tensor.shape)
        elif kind == "scales":
            value = mx.full(tensor.shape, step, dtype=dtype)
        elif kind == "biases":
            value = mx.full(tensor.shape, -7.5 * step, dtype=dtype)
        elif kind == "A_log":
            value = mx.log(mx.random.uniform(0.05, 2.0, tensor.shape, key=used))
        elif owner.endswith("conv1d"):
            value = mx.random.uniform(-0.5, 0.5, tensor.shape, key=used).astype(dtype)
        else:  # norms and dt_bias
            value = mx.ones(tensor.shape, dtype=dtype)
        mx.eval(value)
        weights[path] = value
    return weights


def _planted_weights(plan: _Plan, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Embedding, output projection and the head's fc."""
    embedding = _embedding_words(plan)
    parts = {
        "model.embed_tokens": (embedding, *_embedding_grid(plan, dtype)),
        "lm_head": (_projection_words(plan, embedding), *_projection_grid(plan, dtype)),
        "mtp.fc": _fc(plan, dtype),
    }
    weights: dict[str, mx.array] = {}
    for owner, (words, scales, biases) in parts.items():
        mx.eval(words, scales, biases)
        weights |= {f"{owner}.weight": words, f"{owner}.scales": scales, f"{owner}.biases": biases}
    return weights


def _embedding_words(plan: _Plan) -> mx.array:
    """Signs of every token [V, H / 8]: code, then flags, markers and what tells the trunk's hidden."""
    tokens, width = plan.planted.tokens, (plan.shape.hidden - GROUP) // 8
    source = np.arange(plan.shape.vocabulary) % tokens  # the last 8 have the codes of the first 8
    clusters = (_words(mx.random.key(plan.seed + 1), (tokens // CLUSTER, width)) & _SIGN) | _MINUS
    bits = np.zeros((CLUSTER, 8 * width), dtype=np.bool_)
    taken = sum(plan.bit_channels)
    for member in range(CLUSTER):
        bits[member, :taken] = np.repeat([member >> bit & 1 for bit in range(len(GAPS))], plan.bit_channels)
    kept = _packed(np.where(np.arange(8 * width) < taken, 0, 15))  # where the cluster's signs show
    members = _signs(bits) & ~kept
    code = (clusters[mx.array(source // CLUSTER)] & kept) | members[mx.array(source % CLUSTER)]
    reserved = np.ones((1, GROUP), dtype=np.bool_)
    reserved[:, MARKERS : MARKERS + DEPTHS] = False
    flags = _signs(plan.planted.flagged.T)
    rest = mx.broadcast_to(_signs(reserved)[:, 1:], (plan.shape.vocabulary, GROUP // 8 - 1))
    return mx.concatenate([code, flags, rest], axis=1)


def _embedding_grid(plan: _Plan, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Nibbles 4 and 12 are -1 and +1."""
    shape = (plan.shape.vocabulary, plan.shape.hidden // GROUP)
    return mx.full(shape, 0.25, dtype=dtype), mx.full(shape, -2.0, dtype=dtype)


def _projection_words(plan: _Plan, embedding: mx.array) -> mx.array:
    """The row of successor[t] is t's; the last 8 read a flag and a marker each."""
    tokens = plan.planted.tokens
    before = np.empty(tokens, dtype=np.int64)
    before[plan.planted.successor[:tokens]] = np.arange(tokens)
    nibbles = np.zeros((DEPTHS, GROUP), dtype=np.uint32)
    for depth in range(DEPTHS):
        nibbles[depth, [FLAGS + depth, MARKERS + depth]] = 1
    wrong = mx.concatenate([embedding[-DEPTHS:, : -GROUP // 8], _packed(nibbles)], axis=1)
    return mx.concatenate([embedding[mx.array(before)], wrong])


def _projection_grid(plan: _Plan, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Tokens read codes only, wrong drafts the reserved group only."""
    groups = plan.shape.hidden // GROUP
    scales = np.zeros((plan.shape.vocabulary, groups), dtype=np.float32)
    scales[:-DEPTHS, :-1] = plan.scale
    biases = -8 * scales
    scales[-DEPTHS:, -1] = _short(0.75 * PEAK)
    return mx.array(scales).astype(dtype), mx.array(biases).astype(dtype)


def _fc(plan: _Plan, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Each output is one input, or its opposite: the token's channels, with the hidden's markers moved on by one."""
    hidden = plan.shape.hidden
    reserved = hidden - GROUP
    source, sign = np.arange(hidden), np.ones(hidden, dtype=np.float32)
    markers = reserved + MARKERS + np.arange(DEPTHS)
    source[markers[0]] = hidden + reserved + TRUNK
    source[markers[1:]] = hidden + markers[:-1]
    sign[reserved + TRUNK] = -1
    nibbles = np.zeros((hidden, GROUP), dtype=np.uint32)
    nibbles[np.arange(hidden), source % GROUP] = 1
    scales = np.zeros((hidden, 2 * hidden // GROUP), dtype=np.float32)
    scales[np.arange(hidden), source // GROUP] = sign
    words = _words(mx.random.key(plan.seed + 2), (hidden, 2 * hidden // GROUP, GROUP // 8))
    words[mx.arange(hidden), mx.array(source // GROUP)] = _packed(nibbles)
    scale = mx.array(scales).astype(dtype)
    return words.reshape(hidden, -1), scale, mx.zeros_like(scale)
