"""Guards how Qwen3-Next's fused projections are read: sorted by kind, quantised or not, each trunk and head with norms
as it stores them. `test_families.py` has their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from selfdraft.engine import Request
from selfdraft.errors import CheckpointError
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from tests.reference.families import FAMILIES
from tests.support.checkpoints import Tensors
from tests.support.rows import params, solo

FAMILY = FAMILIES["qwen3_next"]
FORM: dict[str, Any] = {"group_size": 32, "bits": 4}
FUSED = ("in_proj_qkvz.weight", "in_proj_ba.weight")
SORTED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def released() -> Tensors:
    return {name: mx.array(values) for name, values in FAMILY.weights().items()}


def save(folder: Path, tensors: Tensors, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**FAMILY.config, **config}))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def parameters(folder: Path) -> tuple[Any, Tensors]:
    checkpoint = classify(folder)
    assert checkpoint.head.reason == ""
    model: Any = build_model(checkpoint, with_head=True).model
    return model, dict(tree_flatten(model.parameters()))


def mlx_build(folder: Path) -> Path:
    """As mlx-lm converts it: fused projections quantised, norms as 1 + w; the released head lies beside it."""
    stored: Tensors = {}
    for name, tensor in released().items():
        if name.startswith("mtp."):
            continue
        if name.endswith("norm.weight") and "linear_attn" not in name:
            stored[name] = 1 + tensor
        elif name.endswith("conv1d.weight"):
            stored[name] = tensor.swapaxes(1, 2)
        elif name.endswith(FUSED):
            layer = name.removesuffix("weight")
            stored[name], stored[f"{layer}scales"], stored[f"{layer}biases"] = mx.quantize(tensor, **FORM)
        else:
            stored[name] = tensor
    head = {name: tensor for name, tensor in released().items() if name.startswith("mtp.")}
    mx.save_safetensors(str(folder / "mtp.safetensors"), head)
    return save(folder, stored, quantization=FORM)


def test_quantised_projections_are_sorted_as_they_are(tmp_path: Path) -> None:
    """Quantised and then sorted equals sorted and then quantised, to the bit: weights, scales and biases."""
    for folder in ("released", "mlx"):
        (tmp_path / folder).mkdir()
    expected, _ = parameters(save(tmp_path / "released", released()))
    nn.quantize(expected, **FORM, class_predicate=lambda path, _: path.endswith(SORTED))
    built = mlx_build(tmp_path / "mlx")
    checkpoint = classify(built)
    assert (checkpoint.layout, checkpoint.norms) == ("mlx", "one-plus")
    assert (checkpoint.head.source, checkpoint.head.norms) == ("separate", "zero-centred")
    model, found = parameters(built)
    wanted = dict(tree_flatten(expected.parameters()))
    assert found.keys() == wanted.keys()
    assert all(mx.array_equal(tensor, wanted[name]).item() for name, tensor in found.items())
    assert isinstance(model.model.layers[0].linear_attn.in_proj_a, nn.QuantizedLinear)
    texts = [solo(model, Request([1, 2, 3], params(temperature=0.0, max_tokens=20, depth=k))).emitted for k in (0, 2)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_matrix_of_another_size_is_named(tmp_path: Path, name: str) -> None:
    tensors = released()
    whole = f"model.layers.1.linear_attn.{name}"
    tensors[whole] = tensors[whole][:-2]
    with pytest.raises(CheckpointError, match=rf"{whole} has \d+ rows, not {tensors[whole].shape[0] + 2}"):
        classify(save(tmp_path, tensors))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("linear_num_value_heads", 3),
        ("linear_num_key_heads", 0),
        ("linear_value_head_dim", None),
        ("linear_key_head_dim", "16"),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", 2),
        ("mlp_only_layers", ["1"]),
        ("num_experts_per_tok", 6),
        ("num_hidden_layers", 0),
    ],
)
def test_a_config_that_cannot_be(tmp_path: Path, field: str, value: Any) -> None:
    folder = save(tmp_path, released(), **{field: value})
    with pytest.raises(CheckpointError, match=f"config.json.*{field}"):
        build_model(classify(folder), with_head=False)


def test_dense_layers_need_their_size(tmp_path: Path) -> None:
    """Where all layers have experts nobody asks for it."""
    tensors = released()
    parameters(save(tmp_path, tensors, intermediate_size=None))
    folder = save(tmp_path, tensors, intermediate_size=None, mlp_only_layers=[0])
    with pytest.raises(CheckpointError, match="intermediate_size"):
        build_model(classify(folder), with_head=False)
