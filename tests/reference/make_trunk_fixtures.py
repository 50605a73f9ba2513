"""Writes tiny random Qwen3.5 checkpoints and what `transformers` computes from them in float32.

Knows the Hugging Face layout of Qwen3.5 (dense, with an MTP head) and nothing of Selfdraft, so that it is
an independent reference.  The trunk's values come from `Qwen3_5ForCausalLM`; the head's from a transformers
decoder layer that is run over its whole explicit history for every draft, without any cache.

    python tests/reference/make_trunk_fixtures.py [FOLDER]

Each variant is a folder with `config.json`, `model.safetensors` and `expected.safetensors`.  H is the hidden
size, V the vocabulary, n the length of the long prompt:

    short.ids            int32   [7]       long.ids            int32   [n]
    short.trunk_hidden   float32 [7, H]    long.trunk_hidden   float32 [8, H]   the last 8 positions
    short.trunk_logits   float32 [7, V]    long.trunk_logits   float32 [8, V]   the last 8 positions
    long.mtp_hidden      float32 [3, H]    row k-1 is draft depth k
    long.mtp_logits      float32 [3, V]
    long.mtp_drafts      int32   [3]       argmax of each row of long.mtp_logits

Hiddens are those after the final norm (`model.norm`, `mtp.norm`).  The head's history holds the entries
j = 0..n-2, each made from (embedding of ids[j+1], trunk hidden j) at rotary position j.  Depth 1 is the
output of entry n-2; depth k > 1 is the output of the entry (embedding of draft k-1, head hidden of depth k-1)
at position n-3+k.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.utils.logging import disable_progress_bar

VOCABULARY = 97
SHORT_LENGTH = 7
LONG_LENGTH = 99  # more than one chunk of 64, and no multiple of any usual chunk size
LONG_POSITIONS_KEPT = 8
DEPTHS = 3
SMALLEST_DRAFT_MARGIN = 0.2  # a draft must not hang on rounding

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "trunk"


@dataclass(frozen=True)
class Variant:
    """One checkpoint: its text configuration, and how the released family would have stored it."""

    name: str
    seed: int
    text_config: dict[str, Any]
    nested: bool
    dtype: torch.dtype
    trunk_prefix: str = "model."
    float32_tensors: tuple[str, ...] = ()  # name endings kept in float32 in a bfloat16 checkpoint
    with_vision: bool = False


def text_config(**settings: Any) -> dict[str, Any]:
    """The text configuration that all variants share, with `settings` on top."""
    head_dim = settings["head_dim"]
    partial_rotary_factor = settings.pop("partial_rotary_factor", 0.25)
    rope_theta = settings.pop("rope_theta", 10000)
    frequencies = int(head_dim * partial_rotary_factor) // 2
    # The sections for height and width hold no information for text, but real checkpoints have them.
    section_width = frequencies // 3
    interval = settings.setdefault("full_attention_interval", 4)
    layers = settings.setdefault("num_hidden_layers", 4)
    is_full = [(index + 1) % interval == 0 for index in range(layers)]
    return {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": VOCABULARY - 1,
        "hidden_act": "silu",
        "layer_types": ["full_attention" if full else "linear_attention" for full in is_full],
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 512,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "partial_rotary_factor": partial_rotary_factor,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope_theta,
            "partial_rotary_factor": partial_rotary_factor,
            "mrope_interleaved": True,
            "mrope_section": [frequencies - 2 * section_width, section_width, section_width],
        },
        "vocab_size": VOCABULARY,
        **settings,
    }


VARIANTS = [
    Variant(
        name="flat",
        seed=215,
        nested=False,
        dtype=torch.bfloat16,
        text_config=text_config(
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            tie_word_embeddings=True,
        ),
    ),
    Variant(
        name="nested",
        seed=322,
        nested=True,
        dtype=torch.bfloat16,
        text_config=text_config(
            hidden_size=64,  # wide enough for quantisation groups of 64
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            rope_theta=10000000,
            tie_word_embeddings=False,
        ),
    ),
    Variant(
        name="multimodal",
        seed=233,
        nested=True,
        dtype=torch.bfloat16,
        trunk_prefix="model.language_model.",
        float32_tensors=("linear_attn.A_log", "linear_attn.norm.weight"),
        with_vision=True,
        text_config=text_config(
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            tie_word_embeddings=True,
        ),
    ),
    Variant(
        name="odd",
        seed=444,
        nested=True,
        dtype=torch.bfloat16,
        text_config=text_config(
            hidden_size=40,
            intermediate_size=56,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,  # neither 40 / 6 nor any other quotient of the sizes
            linear_num_key_heads=2,
            linear_num_value_heads=8,
            linear_key_head_dim=32,
            linear_value_head_dim=16,
            full_attention_interval=2,
            partial_rotary_factor=0.5,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
    ),
]


# ---- the checkpoint


def full_config(variant: Variant) -> dict[str, Any]:
    """What goes into config.json."""
    dtype = str(variant.dtype).removeprefix("torch.")
    text = {**variant.text_config, "dtype": dtype}
    if not variant.nested:
        return {"architectures": ["Qwen3_5ForCausalLM"], **text}
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5",
        "dtype": dtype,
        "eos_token_id": text["eos_token_id"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
    }
    if variant.with_vision:
        config["architectures"] = ["Qwen3_5ForConditionalGeneration"]
        config["image_token_id"] = VOCABULARY - 2
        config["video_token_id"] = VOCABULARY - 3
        config["vision_start_token_id"] = VOCABULARY - 4
        config["vision_end_token_id"] = VOCABULARY - 5
        config["vision_config"] = {
            "model_type": "qwen3_5_vision",
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_heads": 1,
            "num_position_embeddings": 4,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 2,
        }
    return config


def attention_layer_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a full-attention decoder layer; `q_proj` holds query and gate of each head."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query_width = config["num_attention_heads"] * head_dim
    key_width = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (2 * query_width, hidden),
        "self_attn.k_proj.weight": (key_width, hidden),
        "self_attn.v_proj.weight": (key_width, hidden),
        "self_attn.o_proj.weight": (hidden, query_width),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
    }
    if config["attention_bias"]:
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"self_attn.{projection}.bias"] = shapes[f"self_attn.{projection}.weight"][:1]
    shapes.update(feed_forward_shapes(config))
    return {prefix + name: shape for name, shape in shapes.items()}


def linear_layer_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a gated delta-net decoder layer."""
    hidden, value_heads = config["hidden_size"], config["linear_num_value_heads"]
    key_width = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value_width = value_heads * config["linear_value_head_dim"]
    channels = 2 * key_width + value_width
    shapes: dict[str, tuple[int, ...]] = {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (value_width, hidden),
        "linear_attn.in_proj_b.weight": (value_heads, hidden),
        "linear_attn.in_proj_a.weight": (value_heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.dt_bias": (value_heads,),
        "linear_attn.A_log": (value_heads,),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, value_width),
    }
    shapes.update(feed_forward_shapes(config))
    return {prefix + name: shape for name, shape in shapes.items()}


def feed_forward_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the feed-forward part of a layer and of the layer's two norms."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    return {
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def tensor_shapes(variant: Variant) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of the checkpoint."""
    config, prefix = variant.text_config, variant.trunk_prefix
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        prefix + "embed_tokens.weight": (VOCABULARY, hidden),
        prefix + "norm.weight": (hidden,),
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        **attention_layer_shapes(config, "mtp.layers.0."),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, hidden)
    for index, kind in enumerate(config["layer_types"]):
        layer_shapes = linear_layer_shapes if kind == "linear_attention" else attention_layer_shapes
        shapes.update(layer_shapes(config, f"{prefix}layers.{index}."))
    if variant.with_vision:
        shapes["model.visual.patch_embed.proj.weight"] = (8, 3, 2, 2, 2)
        shapes["model.visual.pos_embed.weight"] = (4, 8)
        shapes["model.visual.blocks.0.attn.qkv.weight"] = (24, 8)
        shapes["model.visual.merger.norm.weight"] = (8,)
    return shapes


def is_zero_centred_norm(name: str) -> bool:
    """Whether the effective weight of the norm is 1 + w."""
    is_norm = name.endswith(("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"))
    return is_norm and "linear_attn" not in name and "visual" not in name


def random_values(name: str, shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """Values that make every part of the model matter, float64 of `shape`."""
    if name.endswith("linear_attn.A_log"):
        return np.linspace(0.0, np.log(16.0), shape[0]) + random.uniform(-0.3, 0.3, shape)
    if name.endswith("linear_attn.dt_bias"):
        # Together with A_log: one head forgets within a few tokens, another outlives a chunk.
        spread = np.linspace(np.log(0.001), np.log(0.1), shape[0])
        time_step = np.exp(spread + random.uniform(-0.3, 0.3, shape))
        return time_step + np.log(-np.expm1(-time_step))  # the inverse of softplus
    if name.endswith("linear_attn.norm.weight"):
        return 1.0 + 0.3 * random.standard_normal(shape)
    if is_zero_centred_norm(name):
        return 0.3 * random.standard_normal(shape)
    if name.endswith(".bias"):
        return 0.5 * random.standard_normal(shape)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return 3.0 / np.sqrt(shape[1]) * random.standard_normal(shape)  # logits of about three units
    if name.endswith("conv1d.weight"):
        return 0.7 * random.standard_normal(shape)
    fan_in = int(np.prod(shape[1:]))
    return 1.3 / np.sqrt(fan_in) * random.standard_normal(shape)


def make_weights(variant: Variant) -> dict[str, Tensor]:
    """All tensors of the checkpoint in the data types of the file."""
    random = np.random.RandomState(variant.seed)  # its stream is frozen: the same in every numpy release
    weights = {}
    for name, shape in sorted(tensor_shapes(variant).items()):
        values = torch.from_numpy(random_values(name, shape, random)).float()
        if variant.dtype != torch.float32 and is_zero_centred_norm(name):
            # 1 + w is made exact in bfloat16, so that a runtime which stores 1 + w computes the same.
            values = (1.0 + values).to(variant.dtype).float() - 1.0
        keep_float32 = bool(variant.float32_tensors) and name.endswith(variant.float32_tensors)
        weights[name] = values if keep_float32 else values.to(variant.dtype)
    return weights


# ---- the reference values


def load_trunk(folder: Path) -> Qwen3_5ForCausalLM:
    """The trunk in float32, read by transformers; raises if a tensor is missing or left over."""
    model, report = Qwen3_5ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    not_trunk = ("mtp.", "model.visual.", "visual.")
    left_over = [name for name in report["unexpected_keys"] if not name.startswith(not_trunk)]
    if report["missing_keys"] or report["mismatched_keys"] or left_over:
        raise ValueError(f"{folder.name}: transformers did not read the checkpoint as a whole: {report}")
    return model.eval()


class HeadReference:
    """The MTP head as one transformers decoder layer that sees its whole history at every call.

    Args:
        config: the text configuration.
        weights: the checkpoint's tensors in float32.
        embed: token ids [T] -> embeddings [T, H] (the trunk's).
        project: hiddens [T, H] -> logits [T, V] (the trunk's output projection).
    """

    def __init__(
        self,
        config: Qwen3_5TextConfig,
        weights: dict[str, Tensor],
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
    ) -> None:
        config = copy.deepcopy(config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        config._attn_implementation = "eager"
        self.embed, self.project = embed, project
        self.input_projection = weights["mtp.fc.weight"]
        self.layer = Qwen3_5DecoderLayer(config, layer_idx=0).float().eval()
        prefix = "mtp.layers.0."
        self.layer.load_state_dict(
            {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        )
        self.rotary = Qwen3_5TextRotaryEmbedding(config)
        self.norms = torch.nn.ModuleDict()
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.norms[name].load_state_dict({"weight": weights[f"mtp.{name}.weight"]})

    def last_output(self, tokens: Tensor, hiddens: Tensor) -> Tensor:
        """Normed output [H] of the last of the entries (tokens[j], hiddens[j]) at positions j = 0..T-1."""
        length = tokens.shape[0]
        embedded = self.norms["pre_fc_norm_embedding"](self.embed(tokens))
        normed = self.norms["pre_fc_norm_hidden"](hiddens)
        entries = torch.cat([embedded, normed], dim=-1) @ self.input_projection.T
        positions = torch.arange(length)[None]
        future = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
        mask = torch.zeros(length, length).masked_fill(future, float("-inf"))[None, None]
        output = self.layer(
            entries[None],
            position_embeddings=self.rotary(entries[None], positions[None]),
            attention_mask=mask,
        )
        return self.norms["norm"](output[0, -1])

    def draft(self, ids: Tensor, trunk_hiddens: Tensor, depths: int) -> tuple[Tensor, Tensor, Tensor]:
        """Argmax drafts after the prompt `ids` [n] with trunk hiddens [n, H].

        Returns hiddens [depths, H], logits [depths, V] and drafts [depths].
        """
        tokens, hiddens = ids[1:], trunk_hiddens[:-1]
        all_hiddens, all_logits, drafts = [], [], []
        for _ in range(depths):
            hidden = self.last_output(tokens, hiddens)
            logits = self.project(hidden[None])[0]
            best, second = logits.topk(2).values.tolist()
            if best - second < SMALLEST_DRAFT_MARGIN:
                raise ValueError(f"a draft hangs on a margin of {best - second:.4f}: choose another seed")
            all_hiddens.append(hidden)
            all_logits.append(logits)
            drafts.append(logits.argmax())
            tokens, hiddens = torch.cat([tokens, drafts[-1][None]]), torch.cat([hiddens, hidden[None]])
        return torch.stack(all_hiddens), torch.stack(all_logits), torch.stack(drafts)


def expected_values(variant: Variant, folder: Path) -> dict[str, Tensor]:
    """The tensors of expected.safetensors (see the module's docstring)."""
    trunk = load_trunk(folder)
    random = np.random.RandomState(variant.seed + 1)
    short = torch.from_numpy(random.randint(0, VOCABULARY, SHORT_LENGTH))
    long = torch.from_numpy(random.randint(0, VOCABULARY, LONG_LENGTH))
    short_hidden = trunk.model(short[None], use_cache=False).last_hidden_state[0]
    long_hidden = trunk.model(long[None], use_cache=False).last_hidden_state[0]
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    head = HeadReference(trunk.config, weights, trunk.model.embed_tokens, trunk.lm_head)
    head_hidden, head_logits, drafts = head.draft(long, long_hidden, DEPTHS)
    kept = long_hidden[-LONG_POSITIONS_KEPT:]
    return {
        "short.ids": short.int(),
        "short.trunk_hidden": short_hidden,
        "short.trunk_logits": trunk.lm_head(short_hidden),
        "long.ids": long.int(),
        "long.trunk_hidden": kept.clone(),
        "long.trunk_logits": trunk.lm_head(kept),
        "long.mtp_hidden": head_hidden,
        "long.mtp_logits": head_logits,
        "long.mtp_drafts": drafts.int(),
    }


def write_variant(variant: Variant, folder: Path) -> None:
    """Writes the three files of a variant into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(full_config(variant), indent=1) + "\n")
    save_file(make_weights(variant), folder / "model.safetensors", metadata={"format": "pt"})
    save_file(expected_values(variant, folder), folder / "expected.safetensors")


@torch.no_grad()
def main(folder: Path) -> None:
    disable_progress_bar()
    # The order of additions, and so the bytes of the files, must not depend on the number of cores.
    torch.set_num_threads(1)
    for variant in VARIANTS:
        write_variant(variant, folder / variant.name)
        print(variant.name, sum(file.stat().st_size for file in (folder / variant.name).iterdir()), "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER)
