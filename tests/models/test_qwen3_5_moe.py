"""Guards that experts are the same ones however a checkpoint stores them, in trunk and head, and that a config which
does not describe them is refused by the field's name. `test_families.py` has their values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from selfdraft.errors import CheckpointError
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from tests.reference.families import FAMILIES
from tests.support.checkpoints import Tensors

FAMILY = FAMILIES["qwen3_5_moe"]
LAYOUTS = ["together", "one by one", "stacked"]
EXPERTS = FAMILY.config["text_config"]["num_experts"]


def released() -> Tensors:
    return {name: mx.array(values) for name, values in FAMILY.weights().items()}


def save(folder: Path, tensors: Tensors, **text_config: Any) -> Path:
    """A checkpoint folder; fields of None are left out of the text config."""
    fields = {**FAMILY.config["text_config"], **text_config}
    kept = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps({**FAMILY.config, "text_config": kept}))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder


def moved(tensors: Tensors, layer: str, layout: str) -> Tensors:
    """The same weights with the experts of a layer (its prefix) in another layout."""
    at = f"{layer}mlp.experts."
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(at)}
    if f"{at}gate_up_proj" in tensors:
        gate, up = mx.split(tensors[f"{at}gate_up_proj"], 2, axis=1)
        down = tensors[f"{at}down_proj"]
    else:
        gate, up, down = (
            mx.stack([tensors[f"{at}{expert}.{kind}_proj.weight"] for expert in range(EXPERTS)])
            for kind in ("gate", "up", "down")
        )
    if layout == "together":
        return kept | {f"{at}gate_up_proj": mx.concatenate([gate, up], axis=1), f"{at}down_proj": down}
    stacks = {"gate": gate, "up": up, "down": down}
    if layout == "stacked":
        return kept | {f"{layer}mlp.switch_mlp.{kind}_proj.weight": stack for kind, stack in stacks.items()}
    return kept | {
        f"{at}{expert}.{kind}_proj.weight": stack[expert] for kind, stack in stacks.items() for expert in range(EXPERTS)
    }


def loaded(folder: Path) -> Tensors:
    checkpoint = classify(folder)
    assert checkpoint.head.reason == ""
    model: Any = build_model(checkpoint, with_head=True).model
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("head", LAYOUTS)
@pytest.mark.parametrize("trunk", LAYOUTS)
def test_experts_are_taken_in_every_layout(tmp_path: Path, trunk: str, head: str) -> None:
    for folder in ("released", "moved"):
        (tmp_path / folder).mkdir()
    tensors = released()
    expected = loaded(save(tmp_path / "released", tensors))
    for layer in range(4):
        tensors = moved(tensors, f"model.language_model.layers.{layer}.", trunk)
    found = loaded(save(tmp_path / "moved", moved(tensors, "mtp.layers.0.", head)))
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(tensor, expected[name]).item() for name, tensor in found.items())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """One of the head's leaves the trunk alone."""
    tensors = released()
    del tensors["mtp.layers.0.mlp.experts.2.up_proj.weight"]
    checkpoint = classify(save(tmp_path, tensors))
    assert re.search(r"switch_mlp\.up_proj\.weight lacks expert 2", checkpoint.head.reason)
    assert build_model(checkpoint, with_head=False).model.max_depth == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", None),
        ("num_experts", 0),
        ("num_experts", True),
        ("num_experts_per_tok", "2"),
        ("num_experts_per_tok", EXPERTS + 1),
        ("moe_intermediate_size", None),
        ("moe_intermediate_size", 16.0),
        ("shared_expert_intermediate_size", -1),
    ],
)
def test_a_config_that_does_not_describe_its_experts(tmp_path: Path, field: str, value: Any) -> None:
    folder = save(tmp_path, released(), **{field: value})
    with pytest.raises(CheckpointError, match=f"config.json.*{field}"):
        build_model(classify(folder), with_head=False)


@pytest.mark.parametrize("field", ["num_experts", "moe_intermediate_size"])
def test_weights_of_other_experts_than_the_config_says(tmp_path: Path, field: str) -> None:
    folder = save(tmp_path, released(), **{field: 4})
    with pytest.raises(CheckpointError, match=r"the weights do not fit config\.json: .*switch_mlp"):
        build_model(classify(folder), with_head=False)
