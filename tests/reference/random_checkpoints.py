"""Tiny random Qwen3.5 checkpoints with an MTP head, as Hugging Face stores them. Knows numpy alone.

Made anew from their seeds wherever they are needed, so that only what transformers computes from them is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

VOCABULARY = 97


@dataclass(frozen=True)
class Variant:
    """One checkpoint: its text configuration, and how the released family would have stored it."""

    name: str
    seed: int
    text_config: dict[str, Any]
    nested: bool
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
    text = {**variant.text_config, "dtype": "bfloat16"}
    if not variant.nested:
        return {"architectures": ["Qwen3_5ForCausalLM"], **text}
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
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


def make_weights(variant: Variant) -> dict[str, np.ndarray]:
    """All tensors of the checkpoint, float32; those that `stored_as` bfloat16 hold values bfloat16 can."""
    random = np.random.RandomState(variant.seed)  # its stream is frozen: the same in every numpy release
    weights = {}
    for name, shape in sorted(tensor_shapes(variant).items()):
        values = random_values(name, shape, random).astype(np.float32)
        if is_zero_centred_norm(name):
            # 1 + w is made exact in bfloat16, so that a runtime which stores 1 + w computes the same.
            values = to_bfloat16(np.float32(1.0) + values) - np.float32(1.0)
        weights[name] = to_bfloat16(values) if stored_as(variant, name) == "bfloat16" else values
    return weights


def stored_as(variant: Variant, name: str) -> str:
    """The data type of a tensor in the file."""
    return "float32" if variant.float32_tensors and name.endswith(variant.float32_tensors) else "bfloat16"


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 values rounded to the nearest that bfloat16 holds, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)
