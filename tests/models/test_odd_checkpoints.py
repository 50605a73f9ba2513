"""Guards that what no checkpoint holds is refused at once and alike, by a load and by what only looks at a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from tests.support.checkpoints import Tensors, save, tensors_of
from tests.support.nano import NANO_CONFIG, nano_model


@pytest.fixture
def tensors() -> Tensors:
    return tensors_of(nano_model(seed=1))


@pytest.mark.parametrize("fault", ["missing", "surplus", "shape", "whole numbers"])
def test_what_does_not_fit_is_told_without_a_load(tmp_path: Path, tensors: Tensors, fault: str) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    faults = {"shape": mx.zeros((64, 65)), "whole numbers": tensors[name].astype(mx.int32)}
    if fault == "missing":
        del tensors[name]
    elif fault == "surplus":
        name = "model.layers.9.norm.weight"
        tensors[name] = mx.ones(2)
    else:
        tensors[name] = faults[fault]
    with pytest.raises(CheckpointError, match=name) as told:
        classify(save(tmp_path, tensors))
    assert str(told.value).endswith("; fetch the checkpoint again")


def test_a_head_that_is_not_used_is_not_held_against_the_trunk(tmp_path: Path, tensors: Tensors) -> None:
    del tensors["mtp.fc.weight"]
    checkpoint = classify(save(tmp_path, tensors))
    assert checkpoint.head.reason
    assert build_model(checkpoint, with_head=False).model.max_depth == 0


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_file_that_is_none_holds_nobody_up(
    tmp_path: Path, tensors: Tensors, name: str, make: Callable[[Path], None]
) -> None:
    folder = save(tmp_path, tensors)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name}.* is no file"):
        classify(folder)


@pytest.mark.parametrize("target", ["nowhere", "model.safetensors"], ids=["dangling", "to itself"])
def test_a_link_to_no_file(tmp_path: Path, tensors: Tensors, target: str) -> None:
    folder = save(tmp_path, tensors)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is no file, or a link to none"):
        classify(folder)


def test_a_number_of_layers_out_of_all_reason(tmp_path: Path, tensors: Tensors) -> None:
    folder = save(tmp_path, tensors)
    (folder / "config.json").write_text(json.dumps(NANO_CONFIG | {"num_hidden_layers": 10**9}))
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1000000000"):
        classify(folder)
