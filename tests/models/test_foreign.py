"""Guards that weights as AWQ, GPTQ and compressed-tensors store them are read as the numbers they stand for.

To the bit, at load and through `forge build`; bits come from shapes; what does not fit is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.forge.build import build
from selfdraft.forge.recipe import DENSE, Recipe
from selfdraft.models import foreign
from selfdraft.models.checkpoint import classify
from selfdraft.models.fit import quantise_as_stored
from tests.reference.families import FAMILIES
from tests.support.checkpoints import Tensors, load_folder, outputs, same_outputs, save, snap_norms, zero_centred
from tests.support.checkpoints import tensors_of as parameters
from tests.support.foreign import Coded, as_awq, as_compressed, as_gptq, random_codes
from tests.support.nano import NANO_CONFIG, nano_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "linear_value_head_dim": 64}
CONFIG = {**NANO_CONFIG, **SIZES}
CODED = ("mlp.up_proj", "mlp.down_proj", "self_attn.v_proj", "linear_attn.out_proj")  # the others are left dense
FEW = Recipe(bits=DENSE, head="dense")  # changes nothing but the layout

Pack = Callable[[Coded], dict[str, np.ndarray]]


def awq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "version": "gemm", "modules_to_not_convert": ["mtp"], **settings}


def gptq(bits: int, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "checkpoint_format": "gptq", "desc_act": False, **settings}


def compressed(bits: int, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": "int", **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": ["x"]}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Pack]] = {
    "awq": (awq(), {"bits": 4, "group": 128}, as_awq),
    "awq-group-32": (awq(version="GEMM"), {"bits": 4, "group": 32}, as_awq),
    "awq-channels": (awq(group_size=-1), {"bits": 4, "group": -1}, as_awq),
    "gptq": (gptq(4), {"bits": 4, "group": 128}, as_gptq),
    "gptq-v2": (gptq(4, checkpoint_format="gptq_v2"), {"bits": 4, "group": 64}, lambda w: as_gptq(w, version=2)),
    "gptq-8": (gptq(8), {"bits": 8, "group": 64}, as_gptq),
    "gptq-channels": (gptq(4, group_size=-1), {"bits": 4, "group": -1}, as_gptq),
    "gptq-channels-act": (gptq(4, group_size=-1, desc_act=True), {"bits": 4, "group": -1}, as_gptq),
    "gptq-small-groups": (gptq(4), {"bits": 4, "group": 16}, as_gptq),
    "gptq-act": (gptq(4, desc_act=True), {"bits": 4, "group": 32, "mixed": True}, as_gptq),
    "gptq-act-8": (
        gptq(8, desc_act=True, checkpoint_format="gptq_v2"),
        {"bits": 8, "group": 64, "mixed": True},
        lambda w: as_gptq(w, version=2),
    ),
    "compressed": (
        compressed(4, strategy="group", symmetric=True),
        {"bits": 4, "group": 128, "symmetric": True},
        lambda w: as_compressed(w, symmetric=True),
    ),
    "compressed-asymmetric": (
        compressed(4, strategy="group"),
        {"bits": 4, "group": 32},
        lambda w: as_compressed(w, symmetric=False),
    ),
    "compressed-8": (
        compressed(8, strategy="group"),
        {"bits": 8, "group": 64},
        lambda w: as_compressed(w, symmetric=False),
    ),
    "compressed-channel": (
        compressed(4, strategy="channel", symmetric=True),
        {"bits": 4, "group": -1, "symmetric": True},
        lambda w: as_compressed(w, symmetric=True),
    ),
    "compressed-act": (
        compressed(4, strategy="group", actorder="group"),
        {"bits": 4, "group": 32, "mixed": True},
        lambda w: as_compressed(w, symmetric=False, mixed=True),
    ),
}
DENSE_CASES = ("gptq-act", "gptq-act-8", "gptq-small-groups", "compressed-act")


def coded_tensors(codes: Mapping[str, Any], pack: Pack, tensors: Tensors) -> tuple[Tensors, dict[str, Coded]]:
    """A checkpoint's tensors with some layers of the trunk in codes, and what those are, by path."""
    stored, coded = dict(tensors), {}
    for seed, name in enumerate(sorted(tensors)):
        path = name.removesuffix(".weight")
        if name.startswith("model.layers.") and path.endswith(CODED):
            shape = tuple(stored.pop(name).shape)
            coded[path] = random_codes(shape, seed=seed, **codes)
            stored |= {f"{path}.{part}": mx.array(values) for part, values in pack(coded[path]).items()}
    return stored, coded


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """In fp16, as Hugging Face stores them."""
    model = nano_model(seed=3, **SIZES)
    snap_norms(model)
    return zero_centred({name: tensor.astype(mx.float16) for name, tensor in parameters(model).items()})


def dequantised(model: Any, path: str) -> np.ndarray:
    layer: Any = dict(model.named_modules())[path]
    weight = layer.weight
    if isinstance(layer, nn.QuantizedLinear):
        weight = mx.dequantize(weight, layer.scales, layer.biases, group_size=layer.group_size, bits=layer.bits)
    return np.array(weight.astype(mx.float32))


@pytest.mark.parametrize("case", CASES)
def test_codes_are_the_numbers_they_stand_for(tmp_path: Path, tensors: Tensors, case: str) -> None:
    settings, codes, pack = CASES[case]
    stored, coded = coded_tensors(codes, pack, tensors)
    assert len(coded) == 9
    folder = save(tmp_path / "source", stored, {**CONFIG, "quantization_config": settings})
    checkpoint = classify(folder)
    assert (checkpoint.head.reason, checkpoint.layout) == ("", "huggingface")
    assert settings["quant_method"] in checkpoint.notes[0]
    loaded = load_folder(folder, dtype=mx.float32)
    for path, weight in coded.items():
        assert np.array_equal(dequantised(loaded.model, path), weight.weight().astype(np.float32)), path
    few = [form for form in loaded.quantisation if form.startswith(f"{codes['bits']}-bit")]
    assert bool(few) == (case not in DENSE_CASES)
    assert sum(loaded.quantisation[form] for form in few) == (0 if case in DENSE_CASES else len(coded))

    plain = {f"{path}.weight": mx.array(weight.weight().astype(np.float32)) for path, weight in coded.items()}
    dense = {name: tensor for name, tensor in stored.items() if not any(name.startswith(f"{p}.") for p in coded)}
    same = load_folder(save(tmp_path / "plain", dense | plain, CONFIG), dtype=mx.float32)
    for ours, theirs in zip(outputs(loaded.model), outputs(same.model), strict=True):
        assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-3).item()

    package = tmp_path / "package"
    build(folder, package, FEW)
    made = classify(package)
    assert made.notes == []
    assert same_outputs(load_folder(package, dtype=mx.float32).model, loaded.model)


def test_zero_points_that_a_scale_s_dtype_rounds_are_near(tmp_path: Path, tensors: Tensors) -> None:
    """A bias is -zero scale in the dtype of the scales: half of its last place, the same for a whole group."""
    stored, coded = coded_tensors({"bits": 4, "group": 128}, lambda w: as_awq(odd(w)), tensors)
    folder = save(tmp_path, stored, {**CONFIG, "quantization_config": awq()})
    model = load_folder(folder, dtype=mx.float32).model
    for path, weight in coded.items():
        exact = odd(weight)
        far = np.abs(dequantised(model, path) - exact.weight())
        assert 0 < far.max() <= 16 * exact.scales.max() * 2**-11


def odd(coded: Coded) -> Coded:
    return replace(coded, scales=(coded.scales * np.float16(1.0009766)).astype(np.float16))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_gptq_may_borrow(bits: int, version: int) -> None:
    """GPTQModel takes one from each code of a word by one subtraction, so that a zero point of 0 borrows."""
    zeros = np.array([[0, 3, 0, 0, 5, 1, 0, 2]]).repeat(1, axis=0)
    coded = random_codes((8, 32), bits, 32, seed=1)
    coded = replace(coded, zeros=zeros.T)
    parts = {name: mx.array(values) for name, values in as_gptq(coded, version=2).items()}
    if version == 1:
        ones = 0x11111111 if bits == 4 else 0x01010101
        parts["qzeros"] = (parts["qzeros"].view(mx.uint32) - mx.array(ones, dtype=mx.uint32)).view(mx.int32)
    settings = gptq(bits, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    found = foreign.in_mlx_layout({f"a.{name}": part for name, part in parts.items()}, settings)
    assert np.array_equal(np.array(found["a.biases"]), -(zeros.T * coded.scales.astype(np.float32)))


@pytest.mark.parametrize("case", ["awq", "gptq", "compressed-asymmetric", "compressed-act", "gptq-small-groups"])
def test_experts_one_by_one(tmp_path: Path, case: str) -> None:
    """Each expert is stored in codes of its own; they come to one stack."""
    settings, codes, pack = CASES[case]
    family = FAMILIES["glm4_moe"]
    stored, plain = {}, {}
    for seed, (name, values) in enumerate(sorted(family.weights().items())):
        path = name.removesuffix(".weight")
        plain[name] = mx.array(values).astype(mx.bfloat16).astype(mx.float32)
        if ".experts." not in name or name.startswith("model.layers.2."):
            stored[name] = plain[name]
            continue
        group = 8 if case in DENSE_CASES else -1  # of 32 and 24 inputs
        coded = random_codes(values.shape, seed=seed, **{**codes, "group": group})
        stored |= {f"{path}.{part}": mx.array(made) for part, made in pack(coded).items()}
        plain[name] = mx.array(coded.weight().astype(np.float32))
    folders = tmp_path / "coded", tmp_path / "plain"
    save(folders[0], stored, {**family.config, "quantization_config": settings})
    save(folders[1], plain, family.config)
    build(folders[0], tmp_path / "package", FEW)
    expected = classify(folders[1]).tensors
    for folder in (folders[0], tmp_path / "package"):
        found = stacks(load_folder(folder, dtype=mx.float32).model)
        assert len(found) >= 3
        for path, weight in found.items():
            assert np.array_equal(weight, np.array(expected[f"{path}.weight"])), path


def stacks(model: Any) -> dict[str, np.ndarray]:
    """Dense weights of all stacked experts."""
    found = {}
    for path, layer in model.named_modules():
        if "switch_mlp." in path and "weight" in layer:
            weight = layer.weight
            if "scales" in layer:
                weight = mx.dequantize(weight, layer.scales, layer.biases, layer.group_size, layer.bits)
            found[path] = np.array(weight.astype(mx.float32))
    return found


def test_bits_of_a_layer_are_those_of_its_shapes(tmp_path: Path, tensors: Tensors) -> None:
    """A checkpoint may hold layers of 4 and of 8 bits, and config.json name one number."""
    stored, few = coded_tensors({"bits": 4, "group": 64}, as_gptq, tensors)
    wide, many = coded_tensors({"bits": 8, "group": 64}, as_gptq, tensors)
    mixed = {name: (wide if "down_proj" in name else stored)[name] for name in stored}
    model = load_folder(save(tmp_path, mixed, {**CONFIG, "quantization_config": gptq(4)}), dtype=mx.float32).model
    for path in few:
        weight = (many if "down_proj" in path else few)[path].weight()
        assert np.array_equal(dequantised(model, path), weight.astype(np.float32))


def drop(part: str) -> Callable[[Tensors, str], None]:
    def spoil(tensors: Tensors, path: str) -> None:
        del tensors[f"{path}.{part}"]

    return spoil


def replaced(part: str, by: Callable[[mx.array], mx.array]) -> Callable[[Tensors, str], None]:
    def spoil(tensors: Tensors, path: str) -> None:
        tensors[f"{path}.{part}"] = by(tensors[f"{path}.{part}"])

    return spoil


SPOILT: dict[str, tuple[str, Callable[[Tensors, str], None]]] = {
    "awq-no-zeros": ("awq", drop("qzeros")),
    "awq-no-scales": ("awq", drop("scales")),
    "awq-codes-as-floats": ("awq", replaced("qweight", lambda words: words.astype(mx.float32))),
    "awq-short-codes": ("awq", replaced("qweight", lambda words: words[:-8])),
    "awq-scales-as-codes": ("awq", replaced("scales", lambda scales: scales.astype(mx.int32))),
    "gptq-no-scales": ("gptq", drop("scales")),
    "gptq-no-g_idx": ("gptq-act", drop("g_idx")),
    "gptq-group-out-of-range": ("gptq-act", replaced("g_idx", lambda groups: groups + 1)),
    "gptq-group-negative": ("gptq-act", replaced("g_idx", lambda groups: groups - 1)),
    "gptq-g_idx-short": ("gptq-act", replaced("g_idx", lambda groups: groups[1:])),
    "gptq-flat-scales": ("gptq", replaced("scales", lambda scales: scales[0])),
    "gptq-zeros-of-other-width": ("gptq", replaced("qzeros", lambda zeros: zeros[:, :-1])),
    "gptq-fewer-groups": ("gptq-v2", replaced("scales", lambda scales: scales[:1])),
    "compressed-no-shape": ("compressed", drop("weight_shape")),
    "compressed-no-scale": ("compressed", drop("weight_scale")),
    "compressed-shape-lies": ("compressed", replaced("weight_shape", lambda shape: shape[::-1] * 2)),
    "compressed-flat-shape": ("compressed", replaced("weight_shape", lambda shape: shape[0])),
    "compressed-zeros-short": ("compressed-asymmetric", replaced("weight_zero_point", lambda zeros: zeros[:-1])),
    "compressed-zeros-narrow": ("compressed-asymmetric", replaced("weight_zero_point", lambda zeros: zeros[:, :1])),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_does_not_fit_is_named(tmp_path: Path, tensors: Tensors, name: str) -> None:
    case, spoil = SPOILT[name]
    settings, codes, pack = CASES[case]
    stored, _ = coded_tensors(codes, pack, tensors)
    spoil(stored, "model.layers.1.mlp.down_proj")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj") as caught:
        classify(save(tmp_path, stored, {**CONFIG, "quantization_config": settings}))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        awq(bits=8),
        awq(version="gemv_fast"),
        gptq(2),
        gptq(4, checkpoint_format="marlin"),
        gptq(4, is_marlin_format=True),
        compressed(4, type="float"),
        compressed(2),
        {**compressed(4), "config_groups": None},
        {**compressed(4), "config_groups": {"group_0": {"weights": None}}},
        {**compressed(4), "config_groups": {"group_0": "int4"}},
        {**compressed(8), "format": "int-quantized"},
        {"quant_method": "bitnet"},
    ],
    ids=str,
)
def test_other_layouts_are_refused(tmp_path: Path, tensors: Tensors, settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="are not supported; take the bf16 checkpoint or an MLX build"):
        classify(save(tmp_path, tensors, {**CONFIG, "quantization_config": settings}))


def test_settings_inside_the_text_config(tmp_path: Path, tensors: Tensors) -> None:
    settings, codes, pack = CASES["awq"]
    stored, coded = coded_tensors(codes, pack, tensors)
    nested = {"model_type": "qwen3_5", "text_config": {**CONFIG, "quantization_config": settings}}
    folder = save(tmp_path / "source", stored, nested)
    assert "'awq'" in classify(folder).notes[0]
    model = load_folder(folder, dtype=mx.float32).model
    assert all(np.array_equal(dequantised(model, path), w.weight().astype(np.float32)) for path, w in coded.items())
    build(folder, tmp_path / "package", FEW)
    assert "quantization_config" not in (tmp_path / "package" / "config.json").read_text()


def test_a_package_tells_mlx_lm_each_layer_s_format(tmp_path: Path, tensors: Tensors) -> None:
    """Groups are AWQ's, and what the recipe quantises has others."""
    settings, codes, pack = CASES["awq"]
    stored, coded = coded_tensors(codes, pack, tensors)
    folder = save(tmp_path / "source", stored, {**CONFIG, "quantization_config": settings})
    build(folder, tmp_path / "package", Recipe.named("4bit", group_size=64, head="dense"))
    config = json.loads((tmp_path / "package" / "config.json").read_text())
    model: Any = classify(folder).architecture.build(CONFIG, False)
    quantise_as_stored(model, classify(tmp_path / "package").tensors)
    wanted = {"group_size": config["quantization"]["group_size"], "bits": config["quantization"]["bits"]}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            said = config["quantization"].get(path, wanted)
            assert (said["group_size"], said["bits"]) == (layer.group_size, layer.bits), path
            assert layer.group_size == (128 if path in coded else 64)
