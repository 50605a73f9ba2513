"""Guards that a config.json that cannot be right ends in one error which names the field, and not in a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from tests.reference.families import FAMILIES, Family

LIES: dict[str, list[tuple[str, Any]]] = {
    "mimo": [
        ("num_key_value_heads", None),
        ("rms_norm_eps", "x"),
        ("rms_norm_eps", -1.0),
        ("rope_theta", "x"),
        ("rope_scaling", "x"),
        ("tie_word_embeddings", "x"),
    ],
    "mimo_v2_flash": [
        ("hybrid_layer_pattern", [0]),
        ("hybrid_layer_pattern", [0, 1, 1, 7]),
        ("moe_layer_freq", None),
        ("partial_rotary_factor", None),
        ("layernorm_epsilon", -1),
        ("attention_value_scale", "x"),
        ("swa_rope_theta", True),
        ("topk_method", "greedy"),
        ("scoring_func", "softmax"),
        ("num_experts_per_tok", 9),
        ("n_group", 3),
        ("partial_rotary_factor", 1.5),
        ("num_nextn_predict_layers", 0),
    ],
    "step3p5": [
        ("layer_types", None),
        ("layer_types", ["x"] * 7),
        ("rope_theta", [1.0]),
        ("rope_theta", "x"),
        ("partial_rotary_factors", [0.5] * 4),
        ("attention_other_setting", "x"),
        ("rope_scaling", "x"),
        ("swiglu_limits", "x"),
        ("moe_top_k", 9),
        ("rms_norm_eps", None),
        ("num_nextn_predict_layers", 0),
    ],
    "ernie4_5_moe": [("rope_theta", "x"), ("rope_theta", None), ("rms_norm_eps", 0), ("moe_k", 10)],
    "qwen3_next": [("rope_theta", "x"), ("partial_rotary_factor", -1), ("partial_rotary_factor", 2)],
    "glm_moe_dsa": [("indexer_rope_interleave", "x")],
    "glm4_moe": [
        ("routed_scaling_factor", None),
        ("rope_theta", "x"),
        ("partial_rotary_factor", 2),
        ("num_experts_per_tok", 100),
        ("n_group", 100),
    ],
    "nemotron_h": [
        ("routed_scaling_factor", "x"),
        ("num_experts_per_tok", 100),
        ("n_group", 100),
    ],
}


def save(family: Family, config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    weights = {tensor: mx.array(values) for tensor, values in family.weights().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def load(name: str, folder: Path, **changed: Any) -> None:
    family = FAMILIES[name]
    save(family, family.config | changed, folder)
    build_model(classify(folder), with_head=True)


@pytest.mark.parametrize(
    ("name", "field", "value"), [(name, *lie) for name, lies in LIES.items() for lie in lies], ids=str
)
def test_a_lie_is_named(name: str, field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json.*{field}"):
        load(name, tmp_path, **{field: value})


def test_a_group_of_one_expert_has_no_best_two(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json.*n_group 6"):
        load("nemotron_h", tmp_path, n_group=6, topk_group=6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_parameters", "x"),
        ("final_logit_softcapping", "x"),
        ("num_global_key_value_heads", 0),
        ("top_k_experts", 100),
        ("rms_norm_eps", -1),
    ],
)
def test_a_lie_of_gemma_is_named(field: str, value: Any, tmp_path: Path) -> None:
    family = FAMILIES["gemma4_experts"]
    save(family, family.config_with(field, value), tmp_path)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{field}"):
        classify(tmp_path)


def test_lists_for_the_trunk_alone_leave_the_head_out(tmp_path: Path) -> None:
    family = FAMILIES["step3p5"]
    save(family, family.config_with("layer_types", family.text["layer_types"][:4]), tmp_path)
    checkpoint = classify(tmp_path)
    assert "layer_types" in checkpoint.head.reason
    assert build_model(checkpoint, with_head=False).model.max_depth == 0


@pytest.mark.parametrize(
    ("field", "value"), [("rms_norm_eps", "x"), ("rope_parameters", "x"), ("rope_parameters", {"full_attention": 5})]
)
def test_an_assistant_that_lies_leaves_the_trunk_alone(field: str, value: Any, tmp_path: Path) -> None:
    family = FAMILIES["gemma4"]
    assert family.assistant
    save(family, family.config, tmp_path)
    save(family.assistant, family.assistant.config_with(field, value), tmp_path / "assistant")
    assert "config" in classify(tmp_path).head.reason


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("moe_layers_enum", "a,b", "invalid literal"),
        ("rope_scaling", {"rope_type": "spiral"}, "spiral"),
        ("attention_other_setting", {"num_attention_heads": 0}, "num_attention_heads"),
        ("swiglu_limits", ["x"] * 7, "str"),
    ],
)
def test_what_no_layer_can_be_built_of_is_said(field: str, value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json.*{said}"):
        load("step3p5", tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("moe_layers_enum", [1, 2, 3]), ("swiglu_limits", [None] * 7), ("swiglu_limits_shared", None)]
)
def test_other_ways_to_say_the_same_are_read(field: str, value: Any, tmp_path: Path) -> None:
    load("step3p5", tmp_path, **{field: value})
