"""Guards adapters: every family's trunk with one is the trunk whose weights were changed by the papers' formulas,
dense or quantised, in both formats; and what does not fit is refused whole.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.models.adapters import read_adapter
from selfdraft.models.base import architecture
from selfdraft.models.checkpoint import classify
from selfdraft.models.few_rows import GatedMLP
from selfdraft.models.loader import build_model
from selfdraft.models.low_rank import LowRankLinear, _product
from tests.reference.families import FAMILIES, Family
from tests.support.adapters import RandomUpdate, linear_names, random_updates, save_mlx_lm, save_peft
from tests.support.checkpoints import outputs, save, tensors_of
from tests.support.families import changed
from tests.support.nano import FOR_KERNELS, NANO_CONFIG, SPARSE, nano_model, write_checkpoint
from tests.support.plain_kernels import plain_kernels
from tests.support.reference import largest_difference
from tests.support.rows import request, solo

CLOSE = 1e-3  # float32 on both sides, added up in another order; logits reach about 10
SAVE = {"mlx-lm": save_mlx_lm, "PEFT": save_peft}


def adapted(folder: Path, adapter: Path, **options: Any) -> Any:
    """The model of a folder with an adapter."""
    checkpoint = classify(folder)
    with_head = not checkpoint.head.reason
    return build_model(checkpoint, with_head=with_head, adapter=read_adapter(adapter, checkpoint), **options).model


def plain(folder: Path, **options: Any) -> Any:
    checkpoint = classify(folder)
    return build_model(checkpoint, with_head=not checkpoint.head.reason, **options).model


def logits(model: Any) -> mx.array:
    hidden, _ = model.forward(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]]), [model.new_state()], keep_steps=True)
    found: mx.array = model.logits(hidden)
    return found


def of_the_trunk(family: Family) -> list[str]:
    """Names of a family's matrices that an adapter may change."""
    text = family.config | family.config.get("text_config", {})
    known: Any = architecture(str(text["model_type"]))
    ours = {name: known.canonical(name, text) for name in linear_names(family.weights())}
    return [name for name, our in ours.items() if our and not our.startswith("mtp.")]


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_familys_trunk_is_changed_as_the_formula_says(name: str, dora: bool, tmp_path: Path) -> None:
    """Every matrix of its layers as Hugging Face stores them: routers and experts one by one, too."""
    family = FAMILIES[name]
    weights = family.weights()
    updates = random_updates({name: weights[name] for name in of_the_trunk(family)})
    assert len(updates) > 3
    (tmp_path / "base").mkdir(), (tmp_path / "merged").mkdir()
    folder = changed(tmp_path / "base", family)
    merged = {
        **weights,
        **{f"{at}.weight": update.merged(weights[f"{at}.weight"], dora=dora) for at, update in updates.items()},
    }
    expected = plain(changed(tmp_path / "merged", family, {at: mx.array(value) for at, value in merged.items()}))
    model = adapted(folder, save_peft(tmp_path / "adapter", updates, dora=dora))
    assert largest_difference(logits(model), logits(expected)) < CLOSE
    assert largest_difference(logits(model), logits(plain(folder))) > 50 * CLOSE


def nano_folder(tmp_path: Path, bits: int | None = None, **config: Any) -> Path:
    return write_checkpoint(tmp_path, nano_model(1, bits=bits, **config), config=config)


def merged_folder(tmp_path: Path, folder: Path, updates: dict[str, RandomUpdate], dora: bool, **config: Any) -> Path:
    """The dense checkpoint that a folder's becomes with an adapter, quantised or not."""
    model = plain(folder)
    dense = {name: _dense(layer) for name, layer in model.named_modules() if "scales" in layer}
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if not name.endswith((".scales", ".biases"))}
    tensors |= {f"{name}.weight": tensor for name, tensor in dense.items()}
    for at, update in updates.items():
        tensors[f"{at}.weight"] = mx.array(update.merged(np.array(tensors[f"{at}.weight"]), dora=dora))
    return save(tmp_path, tensors, {**NANO_CONFIG, **config})


def _dense(layer: Any) -> mx.array:
    return mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=layer.group_size, bits=layer.bits)


def nano_updates(folder: Path) -> dict[str, RandomUpdate]:
    """Of all linear layers of a nano model's trunk, by their names in memory."""
    layers = {
        f"{name}.weight": np.zeros(
            (layer.weight.shape[0], layer.weight.shape[1] * (32 // layer.bits if "scales" in layer else 1))
        )
        for name, layer in plain(folder).named_modules()
        if name.startswith("model.layers.") and isinstance(layer, nn.Linear | nn.QuantizedLinear)
    }
    return random_updates({name: np.full(shape.shape, 0.1, np.float32) for name, shape in layers.items()})


@pytest.mark.parametrize("form", SAVE)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_dense_and_quantised(form: str, dora: bool, bits: int | None, tmp_path: Path) -> None:
    """Against the dense weights that the quantised ones stand for, changed by the formula."""
    folder = nano_folder(tmp_path / "base", bits)
    updates = nano_updates(folder)
    expected = plain(merged_folder(tmp_path / "merged", folder, updates, dora))
    model = adapted(folder, SAVE[form](tmp_path / "adapter", updates, dora=dora))
    assert any(isinstance(layer, LowRankLinear) for layer in model.modules()) == (bits is not None)
    assert largest_difference(logits(model), logits(expected)) < CLOSE


def test_a_bias_is_added_behind_an_update(tmp_path: Path) -> None:
    """DoRA's factors leave it alone."""
    config = {"attention_bias": True}
    folder = nano_folder(tmp_path / "base", 8, **config)
    updates = nano_updates(folder)
    expected = plain(merged_folder(tmp_path / "merged", folder, updates, True, **config))
    model = adapted(folder, save_mlx_lm(tmp_path / "adapter", updates, dora=True))
    assert largest_difference(logits(model), logits(expected)) < CLOSE


def test_the_head_stays_as_it_was(tmp_path: Path) -> None:
    folder = nano_folder(tmp_path / "base")
    model = adapted(folder, save_mlx_lm(tmp_path / "adapter", nano_updates(folder)))
    before = tensors_of(plain(folder))
    for name, tensor in tensors_of(model).items():
        assert mx.array_equal(tensor, before[name]).item() != (
            ".layers." in name and "proj" in name and "mtp" not in name
        )


@pytest.mark.parametrize("mode", ["dense", "quantised"])
def test_stacked_experts(mode: str, tmp_path: Path) -> None:
    """mlx-lm's format: matrices of all experts together."""
    folder = nano_folder(tmp_path / "base", 8 if mode == "quantised" else None, model_type="qwen3_5_moe_text", **SPARSE)
    model = plain(folder)
    tensors = tensors_of(model)
    stacks = {
        name: layer
        for name, layer in model.named_modules()
        if ".switch_mlp." in name and "weight" in layer and name.startswith("model.")
    }
    halves, merged = {}, dict(tensors)
    for name, layer in stacks.items():
        weight = _dense(layer) if "scales" in layer else layer.weight
        each = [
            random_updates({f"{name}.{number}": np.array(one)})[f"{name}.{number}"] for number, one in enumerate(weight)
        ]
        halves[f"{name}.lora_a"] = mx.array(np.stack([update.a for update in each]))
        halves[f"{name}.lora_b"] = mx.array(np.stack([update.b for update in each]))
        changed_experts = [update.merged(np.array(one)) for update, one in zip(each, weight, strict=True)]
        merged[f"{name}.weight"] = mx.array(np.stack(changed_experts))
        for part in ("scales", "biases"):
            merged.pop(f"{name}.{part}", None)
    config = {**NANO_CONFIG, **SPARSE, "model_type": "qwen3_5_moe_text"}
    expected = plain(save(tmp_path / "merged", merged, config))
    assert len(stacks) == 9
    with_adapter = adapted(folder, save_mlx_lm(tmp_path / "adapter", {}, tensors=halves))
    assert largest_difference(logits(with_adapter), logits(expected)) < CLOSE
    assert largest_difference(logits(with_adapter), logits(model)) > 50 * CLOSE


def test_experts_named_one_by_one_go_beside_a_quantised_stack(tmp_path: Path) -> None:
    folder = nano_folder(tmp_path / "base", 8, model_type="qwen3_5_moe_text", **SPARSE)
    layer = dict(plain(folder).named_modules())["model.layers.0.mlp.switch_mlp.up_proj"]
    each = {
        f"model.layers.0.mlp.experts.{number}.up_proj.weight": np.array(weight)
        for number, weight in enumerate(_dense(layer))
    }
    updates = random_updates(each)
    stacked = {
        "model.layers.0.mlp.switch_mlp.up_proj.lora_a": mx.array(np.stack([update.a for update in updates.values()])),
        "model.layers.0.mlp.switch_mlp.up_proj.lora_b": mx.array(np.stack([update.b for update in updates.values()])),
    }
    one = adapted(folder, save_peft(tmp_path / "one", updates))
    other = adapted(folder, save_mlx_lm(tmp_path / "other", {}, tensors=stacked))
    assert largest_difference(logits(one), logits(other)) < 1e-6
    with pytest.raises(CheckpointError, match="lacks expert 2"):
        adapted(folder, save_peft(tmp_path / "few", {at: update for at, update in updates.items() if ".2." not in at}))
    with pytest.raises(CheckpointError, match="DoRA of quantised experts"):
        adapted(folder, save_peft(tmp_path / "dora", updates, dora=True))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("part", [".", "k_proj", "in_proj_z", "up_proj"])
def test_layers_that_are_put_together_keep_their_updates(
    part: str, dora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each its own, also where only one of several has any, and with kernels in the place of MLX's products."""
    folder = nano_folder(tmp_path / "base", 8, **FOR_KERNELS)
    updates = {at: update for at, update in nano_updates(folder).items() if part in at}
    adapter = save_mlx_lm(tmp_path / "adapter", updates, dora=dora)
    expected = logits(adapted(folder, adapter))
    mx.eval(expected)
    plain_kernels(monkeypatch)
    model = adapted(folder, adapter)
    assert model.model.takes([model.new_state()], 8)
    assert "in_proj" in model.model.layers[0].linear_attn
    assert "qkv_proj" in model.model.layers[1].self_attn
    assert all(isinstance(layer.mlp, GatedMLP) for layer in model.model.layers)
    assert largest_difference(logits(model), expected) < CLOSE


@pytest.mark.parametrize("kernels", [False, True], ids=["mlx", "kernels"])
@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("bits", [None, 4])
def test_drafting_equals_plain_decoding(
    bits: int | None, setting: dict[str, Any], kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head knows nothing of the adapter; the text does not hang on it."""
    folder = nano_folder(tmp_path / "base", bits, **FOR_KERNELS)
    adapter = save_mlx_lm(tmp_path / "adapter", nano_updates(folder))
    if kernels:
        plain_kernels(monkeypatch)
    model = adapted(folder, adapter)
    for prompt in ([3, 1, 4], list(range(16)) * 3):
        texts = [solo(model, request(prompt, depth=depth, max_tokens=40, **setting)).emitted for depth in (0, 1, 3, 5)]
        assert texts[1:] == texts[:1] * 3
        base = solo(plain(folder), request(prompt, depth=0, max_tokens=40, **setting)).emitted
        assert base != texts[0]


@pytest.mark.parametrize("rows", [2, 7, 64])
def test_a_rows_update_does_not_depend_on_the_rows_beside_it(rows: int) -> None:
    x, matrix = mx.random.normal((rows, 1, 96), key=mx.random.key(1)), mx.random.normal((96, 40), key=mx.random.key(2))
    whole = _product(x, matrix)
    assert all(mx.array_equal(_product(x[at : at + 1], matrix), whole[at : at + 1]).item() for at in range(rows))
    assert mx.allclose(whole, x @ matrix, atol=1e-4).item()


def test_few_rows_are_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What MLX's product of many rows does to their bits is not to be relied upon."""
    x, matrix = mx.ones((2, 32, 8)), mx.ones((8, 4))
    seen: list[tuple[int, ...]] = []
    stock = mx.array.__matmul__

    def counted(one: mx.array, other: mx.array) -> mx.array:
        seen.append((*one.shape, *other.shape))
        return stock(one, other)

    monkeypatch.setattr(mx.array, "__matmul__", counted)
    _product(x, matrix)
    _product(mx.ones((1, 65, 8)), matrix)
    assert seen == [(2, 32, 1, 8, 2, 32, 8, 4), (1, 65, 8, 8, 4)]


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6.0),  # 12 / sqrt(4)
        ({"lora_alpha": 2}, 0.5),
        ({"r": 64, "rank_pattern": {"up_proj": 4}}, 3.0),
        ({"alpha_pattern": {r"layers\.\d+\.mlp\.up_proj": 8}}, 2.0),
        ({"alpha_pattern": {"p_proj": 8}}, 3.0),  # no layer ends with it behind a dot
        ({"alpha_pattern": {"up_proj": 4, "mlp.up_proj": 8}}, 1.0),
    ],
)
def test_the_scale_is_that_of_peft(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    folder = nano_folder(tmp_path / "base")
    updates = {at: update for at, update in nano_updates(folder).items() if at == "model.layers.1.mlp.up_proj"}
    adapter = read_adapter(save_peft(tmp_path / "adapter", updates, **config), classify(folder))
    assert [update.scale for update in adapter.updates.values()] == [scale]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return nano_folder(tmp_path / "model")


def refusal(folder: Path, adapter: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        adapted(folder, adapter)
    return str(error.value)


def test_no_folder_and_nothing_in_it(folder: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(folder, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "no adapter_config.json" in refusal(folder, tmp_path / "empty")
    file = tmp_path / "file"
    file.write_text("x")
    assert "no such folder" in refusal(folder, file)


@pytest.mark.parametrize("form", SAVE)
def test_a_pickle_is_not_read(form: str, folder: Path, tmp_path: Path) -> None:
    adapter = SAVE[form](tmp_path / "adapter", nano_updates(folder))
    weights = next(adapter.glob("*.safetensors"))
    weights.rename(adapter / "adapter_model.bin")
    assert "adapter_model.bin is no safetensors file" in (said := refusal(folder, adapter))
    assert weights.name in said
    (adapter / "adapter_model.bin").unlink()
    assert f"no {weights.name} there" in refusal(folder, adapter)


def test_a_broken_file(folder: Path, tmp_path: Path) -> None:
    adapter = save_peft(tmp_path / "adapter", nano_updates(folder))
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "adapter_model.safetensors" in refusal(folder, adapter)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite(value: float, folder: Path, tmp_path: Path) -> None:
    updates = nano_updates(folder)
    updates["model.layers.1.mlp.up_proj"].b[3, 1] = value
    assert "layers.1.mlp.up_proj.lora_b holds values that are not finite" in refusal(
        folder, save_mlx_lm(tmp_path / "adapter", updates)
    )


@pytest.mark.parametrize("bits", [None, 8])
def test_an_adapter_of_another_size(bits: int | None, tmp_path: Path) -> None:
    folder = nano_folder(tmp_path / "model", bits)
    other = nano_folder(tmp_path / "other", hidden_size=128)
    said = refusal(folder, save_mlx_lm(tmp_path / "adapter", nano_updates(other)))
    assert "another size" in said
    assert "128" in said
    assert "64" in said


def test_an_adapter_of_a_deeper_model(folder: Path, tmp_path: Path) -> None:
    updates = nano_updates(folder)
    updates["model.layers.7.mlp.up_proj"] = updates["model.layers.1.mlp.up_proj"]
    assert "model.layers.7.mlp.up_proj is in no layer" in refusal(folder, save_peft(tmp_path / "adapter", updates))


def test_an_adapter_of_another_family(folder: Path, tmp_path: Path) -> None:
    updates = random_updates({f"transformer.h.{layer}.attn.c_attn.weight": np.ones((192, 64)) for layer in range(6)})
    said = refusal(folder, save_peft(tmp_path / "adapter", updates))
    assert "transformer.h.0.attn.c_attn" in said
    assert "and 2 more" in said


@pytest.mark.parametrize("layer", ["mtp.layers.0.mlp.up_proj", "model.embed_tokens", "model.visual.blocks.0.attn.qkv"])
def test_what_is_no_layer_of_the_trunk(layer: str, folder: Path, tmp_path: Path) -> None:
    updates = random_updates({f"{layer}.weight": np.ones((16, 64))})
    assert f"{layer} is no linear layer of the text model's trunk" in refusal(
        folder, save_peft(tmp_path / "adapter", updates)
    )


def test_a_quantised_output_projection_is_named(tmp_path: Path) -> None:
    folder = nano_folder(tmp_path / "model", 8)
    updates = random_updates({"lm_head.weight": np.ones((16, 64))})
    assert "lm_head, which is stored quantised" in refusal(folder, save_peft(tmp_path / "adapter", updates))


@pytest.mark.parametrize("extra", ["up_proj.bias", "lm_head.weight", "embed_tokens.lora_embedding_A"])
def test_nothing_is_left_out(extra: str, folder: Path, tmp_path: Path) -> None:
    adapter = save_peft(tmp_path / "adapter", nano_updates(folder))
    tensors: Any = mx.load(str(adapter / "adapter_model.safetensors"))
    save_peft(adapter, {}, tensors={**tensors, f"base_model.model.{extra}": mx.ones((4, 4))})
    assert f"base_model.model.{extra} is no part of a LoRA layer" in refusal(folder, adapter)


@pytest.mark.parametrize(("part", "dora"), [("lora_a", False), ("lora_b", False), ("m", True)])
def test_halves_that_are_missing(part: str, dora: bool, folder: Path, tmp_path: Path) -> None:
    adapter = save_mlx_lm(tmp_path / "adapter", nano_updates(folder), dora=dora)
    tensors: Any = mx.load(str(adapter / "adapters.safetensors"))
    layer = "model.layers.1.mlp.up_proj"
    del tensors[f"{layer}.{part}"]
    assert f"{layer} lacks {part[-1]}" in refusal(folder, save_mlx_lm(adapter, {}, tensors=tensors, dora=dora))


def test_magnitudes_where_none_are_expected(folder: Path, tmp_path: Path) -> None:
    adapter = save_peft(tmp_path / "adapter", nano_updates(folder), dora=True)
    tensors: Any = mx.load(str(adapter / "adapter_model.safetensors"))
    assert "has a magnitude too" in refusal(folder, save_peft(adapter, {}, tensors=tensors))


def test_an_empty_adapter(folder: Path, tmp_path: Path) -> None:
    assert "holds no tensors" in refusal(folder, save_peft(tmp_path / "adapter", {}))


@pytest.mark.parametrize(
    ("form", "config", "said"),
    [
        ("PEFT", {"r": 8}, "has rank 4 and 4, where adapter_config.json says 8"),
        (
            "mlx-lm",
            {"lora_parameters": {"rank": 8, "scale": 1.0}},
            "has rank 4 and 4, where adapter_config.json says 8",
        ),
        ("PEFT", {"r": 0}, "r is 0"),
        ("PEFT", {"r": None}, "r is None"),
        ("PEFT", {"lora_alpha": "16"}, "lora_alpha is '16'"),
        ("PEFT", {"lora_alpha": math.nan}, "lora_alpha is nan|cannot be read as JSON"),
        ("PEFT", {"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ("PEFT", {"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ("PEFT", {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ("PEFT", {"alpha_pattern": ["up"]}, "alpha_pattern is"),
        ("PEFT", {"rank_pattern": {"(": 4}}, "pattern '\\(' cannot be read"),
        ("mlx-lm", {"fine_tune_type": "full"}, "fine_tune_type is 'full'"),
        ("mlx-lm", {"lora_parameters": None}, "neither PEFT's nor mlx-lm's"),
        ("mlx-lm", {"lora_parameters": {"rank": 4, "alpha": 16}}, "lora_parameters.scale is None"),
        ("mlx-lm", {"lora_parameters": {"rank": True, "scale": 1}}, "lora_parameters.rank is True"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_named(
    form: str, config: dict[str, Any], said: str, folder: Path, tmp_path: Path
) -> None:
    adapter = SAVE[form](tmp_path / "adapter", nano_updates(folder), **config)
    with pytest.raises(CheckpointError, match=said):
        adapted(folder, adapter)


@pytest.mark.parametrize(
    ("base", "name", "noted"),
    [
        ("", "Owner/Model-1B", False),
        ("Owner/Model-1B", "Owner/Model-1B", False),
        ("/somewhere/Model-1B", "./Model-1B-4bit", False),
        ("Owner/Model-1B@main", "mlx-community/model-1b-mlx-8bit", False),
        ("Owner/Model-2B", "Owner/Model-1B", True),
        ("Owner/Other", "reference", True),
    ],
)
def test_another_base_is_noted(base: str, name: str, noted: bool, folder: Path, tmp_path: Path) -> None:
    """A name proves nothing: whether it fits is decided by shapes."""
    updates = nano_updates(folder)
    for adapter in (
        save_peft(tmp_path / "peft", updates, base_model_name_or_path=base or None),
        save_mlx_lm(tmp_path / "mlx", updates, model=base),
    ):
        lines = read_adapter(adapter, classify(folder)).notes(name)
        assert f"LoRA of rank 4, {len(updates)} layers" in lines[0]
        assert [base in line and name in line for line in lines[1:]] == [True] * noted


def test_the_digest_is_that_of_both_files(folder: Path, tmp_path: Path) -> None:
    checkpoint, updates = classify(folder), nano_updates(folder)
    adapter = save_peft(tmp_path / "adapter", updates)
    first = read_adapter(adapter, checkpoint).digest
    assert read_adapter(save_peft(tmp_path / "same", updates), checkpoint).digest == first
    save_peft(adapter, updates, lora_alpha=5)
    second = read_adapter(adapter, checkpoint).digest
    updates["model.layers.1.mlp.up_proj"].a[0, 0] += 1
    save_peft(adapter, updates, lora_alpha=5)
    assert len({first, second, read_adapter(adapter, checkpoint).digest}) == 3


def test_json_that_is_none(folder: Path, tmp_path: Path) -> None:
    adapter = save_peft(tmp_path / "adapter", nano_updates(folder))
    (adapter / "adapter_config.json").write_text(json.dumps([1]))
    assert "not a JSON object" in refusal(folder, adapter)


def test_outputs_of_the_head_follow_the_trunk(folder: Path, tmp_path: Path) -> None:
    """It drafts from the adapted trunk's hidden states."""
    model = adapted(folder, save_mlx_lm(tmp_path / "adapter", nano_updates(folder)))
    assert all(not mx.array_equal(a, b).item() for a, b in zip(outputs(model), outputs(plain(folder)), strict=True))
