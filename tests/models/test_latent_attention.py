"""Guards latent attention: one form for all that a cycle has, a prompt in pieces, and how `kv_b_proj` is split."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.models import latent_attention
from selfdraft.models.checkpoint import classify
from selfdraft.models.latent_attention import FEW, split_latent_projections
from selfdraft.models.loader import build_model
from tests.reference.families import FAMILIES, Family, deepseek_v3, deepseek_v32
from tests.support.reference import largest_difference, run_through

LATENT = ["deepseek_v3", "deepseek_v3_direct", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"]
PROMPT = 60


def write_checkpoint(family: Family, folder: Path, config: dict[str, Any] | None = None) -> Path:
    weights = {name: mx.array(values) for name, values in family.weights().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config or family.config))
    return folder


@pytest.fixture(scope="module", params=LATENT)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_model(classify(write_checkpoint(family, tmp_path_factory.mktemp(family.name))), with_head=True).model


def without_experts(family: Family) -> Family:
    """MLX's product with experts takes float32 alone on a CPU."""
    config = {**family.config, "first_k_dense_replace": 9}
    shapes = deepseek_v32.shapes if "index_topk" in config else deepseek_v3.shapes
    return replace(family, config=config, shapes=shapes(config))


@pytest.mark.parametrize("prompt", [4, 9, 11, PROMPT])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_widest_verify_pass_has_the_bits_of_single_tokens(
    family: Family, tmp_path: Path, dtype: mx.Dtype, prompt: int
) -> None:
    """Also where sparse attention begins to choose in it, and among equal scores, of which bf16 has many."""
    written = write_checkpoint(family if dtype == mx.float32 else without_experts(family), tmp_path)
    model: Any = build_model(classify(written), with_head=True, dtype=dtype).model
    tokens = family.prompt(prompt + model.max_depth + 1).tolist()
    assert model.max_depth + 1 <= FEW
    wide, single = model.new_state(), model.new_state()
    for state in (wide, single):
        run_through(model, tokens[:prompt], state, keep_steps=False)
    together = run_through(model, tokens[prompt:], wide, keep_steps=True)
    one_by_one = run_through(model, tokens[prompt:], single, iter([1] * (model.max_depth + 1)), keep_steps=True)
    assert mx.array_equal(together, one_by_one).item()


@pytest.mark.parametrize("scores", [1, 4 * 7 * PROMPT])
def test_a_prompt_in_pieces_is_the_same(model: Any, family: Family, monkeypatch: Any, scores: int) -> None:
    """One query, or seven of four heads, at a time."""
    tokens = family.prompt(PROMPT).tolist()
    whole = run_through(model, tokens, model.new_state(), keep_steps=False)
    monkeypatch.setattr(latent_attention, "SCORES", scores)
    pieces = run_through(model, tokens, model.new_state(), keep_steps=False)
    assert largest_difference(whole, pieces) < 1e-5


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_projection_keeps_its_numbers(bits: int) -> None:
    heads, keys, values, rank = 3, 5, 7, 64
    config = {"num_attention_heads": heads, "qk_nope_head_dim": keys, "v_head_dim": values, "kv_lora_rank": rank}
    parts = mx.quantize(mx.random.normal((heads * (keys + values), rank), key=mx.random.key(1)), 32, bits)
    stored = dict(zip(("weight", "scales", "biases"), parts, strict=True))
    found = split_latent_projections({f"a.kv_b_proj.{part}": tensor for part, tensor in stored.items()}, config)
    whole = mx.dequantize(*parts, group_size=32, bits=bits).reshape(heads, keys + values, rank)
    assert mx.array_equal(found.pop("a.embed_q.weight"), whole[:, :keys].swapaxes(-1, -2)).item()
    kept = [found.pop(f"a.unembed_out.{part}") for part in ("weight", "scales", "biases")]
    assert mx.array_equal(mx.dequantize(*kept, group_size=32, bits=bits), whole[:, keys:]).item()
    assert not found


def test_a_projection_of_another_shape_is_named() -> None:
    config = {"num_attention_heads": 2, "qk_nope_head_dim": 3, "v_head_dim": 4, "kv_lora_rank": 8}
    with pytest.raises(ValueError, match=r"a.kv_b_proj.weight has shape \[13, 8\], not \[14, 8\]"):
        split_latent_projections({"a.kv_b_proj.weight": mx.zeros((13, 8))}, config)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, not 0"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank must be"),
        ({"v_head_dim": None}, "lacks 'v_head_dim'"),
        ({"q_lora_rank": 0}, "q_lora_rank must be"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"n_group": 3}, "n_group 3"),
        ({"topk_group": 1}, "num_experts_per_tok 3"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "spiral", "factor": 2}}, "spiral"),
        ({"rope_scaling": 4}, "rope_scaling"),
        ({"rope_theta": "ten"}, "rope_theta"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor"),
        ({"index_topk": 0}, "index_topk must be"),
        ({"q_lora_rank": None}, "lacks 'q_lora_rank'"),
        ({"index_topk_freq": 4}, "index_topk_freq 4: layers that share"),
        ({"indexer_types": ["full", "shared", "full"]}, "indexer_types .*share"),
        ({"index_topk_pattern": "FSF"}, "index_topk_pattern 'FSF'"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    family = FAMILIES["deepseek_v32"]
    write_checkpoint(family, tmp_path, {**family.config, **changed})
    with pytest.raises(CheckpointError, match=named):
        build_model(classify(tmp_path), with_head=True)
