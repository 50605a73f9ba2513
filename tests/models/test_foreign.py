"""Guards weights of other formats: what AWQ, GPTQ and compressed-tensors store is what is loaded, and a layer whose
tensors do not fit each other ends in one error that names it.

Codes are packed here as the formats' own code packs them (AutoAWQ `gemm`, GPTQModel, compressed-tensors).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.models.checkpoint import accept, classify
from selfdraft.models.foreign import in_mlx_layout
from tests.reference.families import FAMILIES

OUTPUTS, INPUTS = 48, 64
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
}
LAYER = "model.layers.0.mlp.gate_proj."


def packed(codes: np.ndarray, bits: int = 4, order: tuple[int, ...] = tuple(range(8))) -> mx.array:
    """Codes [M, N] -> int32 [M, N bits / 32]; `order`: which column of eight comes first, second, ..."""
    each = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // each), np.uint32)
    for place in range(each):
        words |= codes[:, (order[place] if bits == 4 else place) :: each].astype(np.uint32) << np.uint32(place * bits)
    return mx.array(words.view(np.int32))


class Layer:
    """Random codes [out, in], zero points and scales [out, groups], and the weight they stand for."""

    def __init__(self, group: int, bits: int = 4, groups: np.ndarray | None = None) -> None:
        random, count = np.random.RandomState(group), INPUTS // group
        self.codes = random.randint(0, 1 << bits, (OUTPUTS, INPUTS))
        self.zeros = random.randint(1, 1 << bits, (OUTPUTS, count))
        self.scales = random.uniform(0.01, 0.02, (OUTPUTS, count)).astype(np.float16)
        self.groups = np.arange(INPUTS) // group if groups is None else groups
        self.weight = (self.codes - self.zeros[:, self.groups]) * self.scales[:, self.groups].astype(np.float32)


def assert_stands_for(found: dict[str, mx.array], layer: Layer, group: int, bits: int = 4) -> None:
    assert ("l.scales" in found) == (group >= 32 and layer.groups[0] == 0), "groups that MLX has are not expanded"
    weight = found["l.weight"]
    if "l.scales" in found:
        weight = mx.dequantize(weight, found["l.scales"], found["l.biases"], group_size=group, bits=bits)
    # A bias is rounded to the scales' dtype.
    np.testing.assert_allclose(np.array(weight.astype(mx.float32)), layer.weight, atol=0.02 * (1 << bits) * 2**-10)


@pytest.mark.parametrize("group", [64, 32, 16])
def test_awq(group: int) -> None:
    layer, order = Layer(group), (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "l.qweight": packed(layer.codes.T, order=order),
        "l.qzeros": packed(layer.zeros.T, order=order),
        "l.scales": mx.array(layer.scales.T),
    }
    assert_stands_for(in_mlx_layout(stored, AWQ), layer, group)


@pytest.mark.parametrize("less", [1, 0])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, 32, 16])
def test_gptq(group: int, bits: int, less: int) -> None:
    layer = Layer(group, bits)
    stored = {
        "l.qweight": packed(layer.codes, bits).T,
        "l.qzeros": packed((layer.zeros - less).T, bits),
        "l.scales": mx.array(layer.scales.T),
    }
    settings = {**GPTQ, "bits": bits, "checkpoint_format": "gptq" if less else "gptq_v2"}
    assert_stands_for(in_mlx_layout(stored, settings), layer, group, bits)


def test_gptq_in_the_order_of_activations() -> None:
    layer = Layer(32, groups=np.arange(INPUTS)[::-1] // 32)
    stored = {
        "l.qweight": packed(layer.codes).T,
        "l.qzeros": packed((layer.zeros - 1).T),
        "l.scales": mx.array(layer.scales.T),
        "l.g_idx": mx.array(layer.groups.astype(np.int32)),
    }
    assert_stands_for(in_mlx_layout(stored, {**GPTQ, "desc_act": True}), layer, 32)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [64, 32, 16])
def test_compressed_tensors(group: int, symmetric: bool) -> None:
    layer = Layer(group)
    if symmetric:
        layer.weight = (layer.codes - 8) * layer.scales[:, layer.groups].astype(np.float32)
    stored = {
        "l.weight_packed": packed(layer.codes),
        "l.weight_scale": mx.array(layer.scales),
        "l.weight_shape": mx.array([OUTPUTS, INPUTS]),
    }
    if not symmetric:
        stored["l.weight_zero_point"] = packed(layer.zeros.T).T
    assert_stands_for(in_mlx_layout(stored, COMPRESSED), layer, group)


def ints(*shape: int) -> mx.array:
    return mx.zeros(shape, mx.int32)


def halves(*shape: int) -> mx.array:
    return mx.zeros(shape, mx.float16)


BROKEN: list[tuple[dict[str, Any], dict[str, mx.array]]] = [
    (AWQ, {"qweight": ints(3, 5), "qzeros": ints(1, 2), "scales": halves(1, 7)}),
    (AWQ, {"qweight": ints(8), "qzeros": ints(8), "scales": halves(8)}),
    (AWQ, {"qweight": ints(32, 6), "qzeros": ints(0, 6), "scales": halves(0, 48)}),
    (AWQ, {"qweight": ints(32, 6), "scales": halves(1, 48)}),
    (GPTQ, {"qweight": ints(3, 5), "qzeros": ints(1, 2), "scales": halves(1, 7)}),
    (
        {**GPTQ, "desc_act": True},
        {"qweight": ints(4, 48), "qzeros": ints(1, 6), "scales": halves(1, 48), "g_idx": mx.full((32,), 9)},
    ),
    (COMPRESSED, {"weight_packed": ints(48, 3), "weight_scale": halves(49, 7)}),
    ({"quant_method": "fp8"}, {"weight": mx.zeros((48, 32), mx.uint8), "weight_scale_inv": halves(9, 9)}),
    ({"quant_method": "fp8"}, {"weight_scale_inv": halves(1, 1)}),
]


def write(folder: Path, settings: dict[str, Any], parts: dict[str, mx.array]) -> None:
    family = FAMILIES["mimo"]
    tensors = {name: mx.array(values) for name, values in family.weights().items() if name != f"{LAYER}weight"}
    tensors |= {LAYER + name: tensor for name, tensor in parts.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(family.config | {"quantization_config": settings}))


@pytest.mark.parametrize(("settings", "parts"), BROKEN, ids=lambda value: str(list(value)))
def test_a_layer_whose_tensors_do_not_fit_is_named(
    settings: dict[str, Any], parts: dict[str, mx.array], tmp_path: Path
) -> None:
    write(tmp_path, settings, parts)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.gate_proj.*fetch the checkpoint again"):
        classify(tmp_path)


@pytest.mark.parametrize(
    "groups", [None, 5, [1], {}, {"a": 5}, {"a": {"weights": None}}, {"a": {"weights": {"num_bits": 3}}}], ids=str
)
def test_groups_of_no_known_width_are_refused_before_the_weights_are_there(groups: Any, tmp_path: Path) -> None:
    write(tmp_path, {**COMPRESSED, "config_groups": groups}, {})
    with pytest.raises(CheckpointError, match="config_groups"):
        accept(tmp_path, ["model.safetensors"])
