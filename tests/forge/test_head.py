"""Guards that a package's head is stored as it was asked for or as it drafts best, and that noise does not decide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft import load
from selfdraft.forge import Recipe, build, head
from selfdraft.forge.acceptance import Acceptance
from selfdraft.forge.plan import HEAD_FILE
from selfdraft.forge.texts import CALIBRATION, HELD_OUT
from selfdraft.stamp import read_stamp
from tests.support.checkpoints import add_text_side, save, tensors_of
from tests.support.nano import NANO_CONFIG, SPARSE, nano_model

from .support import VOCABULARY, few_texts, nano_source

UP = "mtp.layers.0.mlp.up_proj"


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    few_texts(monkeypatch)


def stored(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / HEAD_FILE))  # type: ignore[return-value]


def made(tmp_path: Path, way: Any, **fields: Any) -> Any:
    return build(nano_source(tmp_path / "source", **fields), tmp_path / "package", Recipe.named("4bit", head=way))


def test_calibrated(tmp_path: Path) -> None:
    built = made(tmp_path, "4bit")
    assert built.head.kept == "4bit"
    tensors, source = stored(built.folder), mx.load(str(tmp_path / "source" / "model.safetensors"))
    plain = mx.quantize(source[f"{UP}.weight"], bits=4, group_size=64)
    assert tensors[f"{UP}.weight"].shape == plain[0].shape
    assert not mx.array_equal(tensors[f"{UP}.weight"], plain[0]).item()
    dense = {name for name in tensors if name.endswith("weight") and tensors[name].dtype != mx.uint32}
    assert all("norm" in name or name == "mtp.fc.weight" for name in dense)
    # On a CPU a quantised package is computed in fp32: that must not be what is stored.
    assert {tensors[name].dtype for name in tensors if not name.endswith("weight") or name in dense} == {mx.bfloat16}
    assert all(mx.array_equal(tensors[name], source[name]).item() for name in dense)
    index = json.loads((built.folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name for name, where in index.items() if where == HEAD_FILE} == tensors.keys()


def test_rounded(tmp_path: Path) -> None:
    built = made(tmp_path, "4bit-naive")
    source = mx.load(str(tmp_path / "source" / "model.safetensors"))
    plain = mx.quantize(source[f"{UP}.weight"], bits=4, group_size=64)
    tensors = stored(built.folder)
    for part, array in zip(("weight", "scales", "biases"), plain, strict=True):
        assert mx.array_equal(tensors[f"{UP}.{part}"], array).item()


def test_dense_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head.LLM, "open", None)
    built = made(tmp_path, "dense")
    assert built.head is None
    source = mx.load(str(tmp_path / "source" / "model.safetensors"))
    assert all(mx.array_equal(tensor, source[name]).item() for name, tensor in stored(built.folder).items())


def test_all_ways_are_reported(tmp_path: Path) -> None:
    built = made(tmp_path, "auto")
    stamp = read_stamp(built.folder)
    assert stamp is not None
    assert stamp.head == built.head.describe()
    assert stamp.head["kept"] in stamp.head["ways"]
    assert list(stamp.head["ways"]) == ["dense", "4bit-naive", "4bit"]
    for found in stamp.head["ways"].values():
        assert len(found["acceptance"]) == 4
        assert all(0 <= rate <= 1 for rate in found["acceptance"])
        assert 1 <= found["tokens_per_cycle"] <= 5
    assert stamp.head["ways"]["4bit"]["bytes"] < 0.7 * stamp.head["ways"]["dense"]["bytes"]


def test_a_package_computes_with_the_head_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[str, Any] = {}

    def measure(model: Any, heads: dict[str, Any], *given: Any, **named: Any) -> Any:
        measured.update(heads)
        return plain(model, heads, *given, **named)

    plain = head.measure
    monkeypatch.setattr(head, "measure", measure)
    built = made(tmp_path, "4bit", **SPARSE)
    model: Any = load(str(built.folder)).loaded.model
    loaded = tensors_of(model.mtp)
    taken = tensors_of(measured["4bit"])
    assert loaded.keys() == taken.keys()
    assert all(mx.array_equal(tensor, taken[name]).item() for name, tensor in loaded.items())


def test_routers_stay(tmp_path: Path) -> None:
    tensors = stored(made(tmp_path, "4bit", **SPARSE).folder)
    assert "mtp.layers.0.mlp.switch_mlp.up_proj.scales" in tensors
    assert "mtp.layers.0.mlp.gate.scales" not in tensors
    assert "mtp.layers.0.mlp.shared_expert_gate.scales" not in tensors


def test_a_head_in_codes_is_kept_as_it_is(tmp_path: Path) -> None:
    model = nano_model(bits=4, dtype=mx.bfloat16, vocab_size=VOCABULARY)
    config = {**NANO_CONFIG, "vocab_size": VOCABULARY, "quantization": {"bits": 4, "group_size": 32}}
    source = add_text_side(save(tmp_path / "source", tensors_of(model), config))
    built = build(source, tmp_path / "package", Recipe.named("4bit"))
    assert built.head is None
    before = tensors_of(model)
    assert all(mx.array_equal(tensor, before[name]).item() for name, tensor in stored(built.folder).items())


def found(mean: float, *apart: float) -> Acceptance:
    """Of texts whose tokens a cycle differ from the mean."""
    positions = np.full(len(apart), 10)
    return Acceptance((0.5,), 10 * (mean + np.array(apart)), positions)


@pytest.mark.parametrize(
    ("dense", "naive", "kept"),
    [
        (found(3.0, 0, 0, 0), found(3.0, 0, 0, 0), "4bit"),
        (found(3.05, 0, 0, 0), found(3.0, 0, 0, 0), "4bit"),  # less than 2% better
        (found(3.2, 0, 0, 0), found(3.0, 0, 0, 0), "dense"),
        (found(3.2, -0.6, 0, 0.6), found(3.0, 0, 0, 0), "4bit"),  # by no more than the error
        (found(3.2, 0, 0, 0), found(3.3, 0, 0, 0), "4bit-naive"),
        (found(2.0, 0, 0, 0), found(2.0, 0, 0, 0), "4bit"),
    ],
)
def test_auto(dense: Acceptance, naive: Acceptance, kept: str) -> None:
    assert head._best({"dense": dense, "4bit-naive": naive, "4bit": found(3.0, 0, 0, 0)}) == kept


def test_texts_are_not_those_of_calibration() -> None:
    assert not set(CALIBRATION) & set(HELD_OUT)
