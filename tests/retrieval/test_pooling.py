"""Guards the formulas of pooling and of the steps behind it, and that padding has no part in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.retrieval.modules import Dense, Pooling, read_steps
from selfdraft.retrieval.pooling import POOLINGS, normalised, pool
from tests.support.retrieval import altered

RANDOM = np.random.default_rng(0)
STATES = RANDOM.normal(size=(3, 5, 4)).astype(np.float32)
LENGTHS = (5, 1, 3)
MASK = np.array([[index < length for index in range(5)] for length in LENGTHS], np.float32)

FORMULAS: dict[str, Callable[[Any], Any]] = {
    "cls": lambda row: row[0],
    "mean": lambda row: row.mean(axis=0),
    "max": lambda row: row.max(axis=0),
    "mean_sqrt_len": lambda row: row.sum(axis=0) / np.sqrt(len(row)),
    "weightedmean": lambda row: np.average(row, axis=0, weights=np.arange(1, len(row) + 1)),
    "lasttoken": lambda row: row[-1],
}


def rows() -> list[Any]:
    return [STATES[row, :length] for row, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("way", POOLINGS)
def test_each_way_is_its_formula_on_the_tokens_alone(way: str) -> None:
    found = np.array(pool(mx.array(STATES), mx.array(MASK), [way]))
    assert np.allclose(found, [FORMULAS[way](row) for row in rows()], atol=1e-6)


def test_several_ways_stand_side_by_side() -> None:
    found = np.array(pool(mx.array(STATES), mx.array(MASK), ["cls", "max"]))
    assert np.allclose(found, [np.concatenate([row[0], row.max(axis=0)]) for row in rows()])


def test_a_zero_vector_stays_one() -> None:
    found = np.array(normalised(mx.array([[3.0, 4.0], [0.0, 0.0]])))
    assert np.allclose(found, [[0.6, 0.8], [0, 0]])


MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
    {"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"},
]
DENSE = {"in_features": 4, "out_features": 2, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}


def folder_with(folder: Path, pooling: dict[str, Any], dense: dict[str, Any] = DENSE) -> Path:
    files = {"modules.json": MODULES, "1_Pooling/config.json": pooling, "2_Dense/config.json": dense}
    altered("bert", folder, files=files)
    weights = {"linear.weight": mx.array([[1.0, 0, 0, 0], [0, 2.0, 0, 0]]), "linear.bias": mx.array([0.0, 0.5])}
    mx.save_safetensors(str(folder / "2_Dense" / "model.safetensors"), weights)
    return folder


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode_max_tokens": True}, {"pooling_mode": "max"}, {"pooling_mode": ["max"]}]
)
def test_steps_are_those_of_modules_json_in_their_order(tmp_path: Path, pooling: dict[str, Any]) -> None:
    values = mx.array(STATES)
    for step in read_steps(folder_with(tmp_path, pooling), "mean"):
        values = step(values, mx.array(MASK))
    pooled = np.array([row.max(axis=0) for row in rows()])
    dense = np.tanh(np.stack([pooled[:, 0], 2 * pooled[:, 1] + 0.5], axis=1))
    assert np.allclose(np.array(values), dense / np.linalg.norm(dense, axis=1, keepdims=True), atol=1e-6)


def test_without_modules_json_it_is_the_familys_way(tmp_path: Path) -> None:
    altered("bert", tmp_path)
    steps = read_steps(tmp_path, "lasttoken")
    assert steps[0] == Pooling(("lasttoken",))
    assert len(steps) == 2


@pytest.mark.parametrize(
    ("pooling", "dense", "said"),
    [
        ({"pooling_mode": "attention"}, DENSE, "'attention' is no way of pooling"),
        ({}, DENSE, "'nothing' is no way of pooling"),
        ({"pooling_mode": "cls", "include_prompt": False}, DENSE, "include_prompt false"),
        ({"pooling_mode": "cls"}, DENSE | {"activation_function": "torch.nn.Softsign"}, "'Softsign' is not supported"),
        ({"pooling_mode": "cls"}, DENSE | {"in_features": 5}, r"linear.weight has shape \[2, 4\], not \[2, 5\]"),
        ({"pooling_mode": "cls"}, DENSE | {"out_features": None}, "no usable dense layer"),
    ],
)
def test_a_step_that_cannot_be_done_is_named(
    tmp_path: Path, pooling: dict[str, Any], dense: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_steps(folder_with(tmp_path, pooling, dense), "mean")


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([MODULES[0]], "no Pooling behind the Transformer"),
        ([MODULES[0], MODULES[3]], "no Pooling behind the Transformer"),
        ([MODULES[0], {"type": "x.CNN", "path": "1_CNN"}], "a step of type 'CNN' is not supported"),
        ([MODULES[0], {"type": "x.Pooling", "path": "../1_Pooling"}], "no step with a type and a folder of its own"),
        ([MODULES[0], {"type": "x.Pooling"}], "no step with a type and a folder of its own"),
        ({}, "holds dict, not a JSON list"),
    ],
)
def test_modules_json_that_cannot_be_followed(tmp_path: Path, modules: Any, said: str) -> None:
    altered("bert", tmp_path, files={"modules.json": modules})
    with pytest.raises(CheckpointError, match=said):
        read_steps(tmp_path, "mean")


def test_a_pooling_that_was_left_behind_is_not_guessed(tmp_path: Path) -> None:
    altered("bert", tmp_path, files={"modules.json": MODULES[:2]})
    with pytest.raises(CheckpointError, match="and missing: how the model pools is not known"):
        read_steps(tmp_path, "mean")


def test_a_dense_layer_without_safetensors_is_refused(tmp_path: Path) -> None:
    folder_with(tmp_path, {"pooling_mode": "cls"})
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="other weight formats are not read"):
        Dense.read(tmp_path / "2_Dense")
