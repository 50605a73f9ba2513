"""Guards that a head in a file of its own is used only after it proved that it belongs to the trunk.

Names and shapes cannot tell a foreign head; acceptance on fixed text can. A refused head means plain decoding and a
note with the figure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft import LLM, CheckpointError, SamplingParams, load
from selfdraft.models.base import Model
from selfdraft.models.checkpoint import classify
from selfdraft.models.folder import read_json
from selfdraft.models.probe import LEAST_ACCEPTANCE, probe_acceptance
from selfdraft.source import REFERENCE, find_model
from tests.support.checkpoints import Tensors, add_text_side, is_zero_centred, renamed, save, tensors_of
from tests.support.nano import nano_model

CONFIG = read_json(find_model(REFERENCE) / "config.json")
QUESTION = "Hello! Who are you?"


@pytest.fixture(scope="module")
def stored() -> Tensors:
    return mx.load(str(find_model(REFERENCE) / "model.safetensors"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def trunk(stored: Tensors) -> Tensors:
    return {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")}


@pytest.fixture(scope="module")
def head(stored: Tensors) -> Tensors:
    return {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}


def open_with(folder: Path, trunk: Tensors, head: Tensors, **layout: Any) -> LLM:
    """A model whose head lies beside it."""
    return load(str(add_text_side(save(folder, trunk, CONFIG, beside=head, **layout))))


def assert_drafts(llm: LLM) -> None:
    assert llm.max_depth > 0
    assert llm.notes == []
    timings = llm.generate(QUESTION, SamplingParams(depth=3, max_tokens=10, temperature=0.0)).timings
    assert timings.drafts_accepted[0] / timings.drafts_tried[0] > 0.5


def refused_acceptance(llm: LLM) -> int:
    """Per cent, from the note of a model that decodes without its head; it is checked that it does."""
    assert llm.max_depth == 0
    (note,) = llm.notes
    assert note.startswith("plain decoding: the separate head file drafts ")
    timings = llm.generate(QUESTION, SamplingParams(max_tokens=4, temperature=0.0)).timings
    assert timings.emitted["plain"] == 3
    return int(note.split("%")[0].rsplit(" ", 1)[1])


def test_a_head_beside_the_shards_is_used_after_the_probe(
    tmp_path: Path, trunk: Tensors, head: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[float] = []

    def probe(model: Model, tokens: Sequence[int]) -> float:
        probed.append(probe_acceptance(model, tokens))
        return probed[-1]

    monkeypatch.setattr("selfdraft.models.probe.probe_acceptance", probe)
    llm = open_with(tmp_path, trunk, head, shards=2)
    assert llm.checkpoint.head.source == "separate"
    assert_drafts(llm)
    # The reference head is far from the threshold on its good side; those refused below are on the other.
    assert len(probed) == 1
    assert probed[0] > 2 * LEAST_ACCEPTANCE


@pytest.mark.parametrize("prefix", ["", "model.mtp.", "language_model.mtp."])
def test_names_in_a_head_file(tmp_path: Path, trunk: Tensors, head: Tensors, prefix: str) -> None:
    """A file that holds nothing but a head may leave out the prefix."""
    beside = renamed(head, lambda name: prefix + name.removeprefix("mtp."))
    checkpoint = classify(save(tmp_path, trunk, CONFIG, beside=beside))
    assert (checkpoint.head.source, checkpoint.head.tensors, checkpoint.head.reason) == ("separate", 15, "")


def test_norms_in_the_other_convention_are_recognised(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    shifted = {
        name: (tensor.astype(mx.float32) + 1).astype(tensor.dtype) if is_zero_centred(name) else tensor
        for name, tensor in head.items()
    }
    llm = open_with(tmp_path, trunk, shifted)
    assert (llm.checkpoint.norms, llm.checkpoint.head.norms) == ("zero-centred", "one-plus")
    assert_drafts(llm)


def foreign(head: Tensors) -> Tensors:
    """Random weights of the right shapes and scales."""
    return {
        name: tensor
        if is_zero_centred(name)
        else (mx.std(tensor) * mx.random.normal(tensor.shape, key=mx.random.key(len(name)))).astype(tensor.dtype)
        for name, tensor in head.items()
    }


def halves_swapped(head: Tensors) -> Tensors:
    """Hidden first, embedding second: the wiring of another family."""
    first, second = mx.split(head["mtp.fc.weight"], 2, axis=1)
    return head | {"mtp.fc.weight": mx.concatenate([second, first], axis=1)}


@pytest.mark.parametrize("spoil", [foreign, halves_swapped])
def test_a_head_that_does_not_belong_is_refused_with_its_acceptance(
    tmp_path: Path, trunk: Tensors, head: Tensors, spoil: Any
) -> None:
    llm = open_with(tmp_path, trunk, spoil(head))
    assert llm.checkpoint.head.reason == ""  # nothing in names and shapes tells
    assert refused_acceptance(llm) < 10


def test_an_incomplete_head_beside_the_shards(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    partial = {name: tensor for name, tensor in head.items() if name != "mtp.norm.weight"}
    llm = open_with(tmp_path, trunk, partial)
    assert llm.max_depth == 0
    assert llm.notes == ["plain decoding: the MTP head lacks 'mtp.norm.weight' (1 of 15 tensors missing)"]


def test_a_head_of_another_size_is_refused_with_the_tensor(tmp_path: Path, trunk: Tensors) -> None:
    other = {name: tensor for name, tensor in tensors_of(nano_model()).items() if name.startswith("mtp.")}
    llm = open_with(tmp_path, trunk, other)
    assert llm.max_depth == 0
    (note,) = llm.notes
    assert note.startswith("plain decoding: ")
    assert "mtp.fc.weight" in note


def test_a_broken_head_file_is_named(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    folder = add_text_side(save(tmp_path, trunk, CONFIG, beside=head))
    file = folder / "mtp.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match=r"mtp\.safetensors"):
        load(str(folder))


def test_a_head_file_listed_in_the_index_is_embedded(tmp_path: Path, trunk: Tensors, head: Tensors) -> None:
    """The checkpoint vouches for it: no probe."""
    folder = save(tmp_path, trunk, CONFIG, shards=2, beside=foreign(head))
    index = folder / "model.safetensors.index.json"
    body = read_json(index)
    body["weight_map"] |= dict.fromkeys(head, "mtp.safetensors")
    index.write_text(json.dumps(body))
    checkpoint = classify(folder)
    assert (checkpoint.head.source, checkpoint.head.tensors, checkpoint.head.reason) == ("embedded", 15, "")


def test_an_embedded_head_wins_over_one_beside_it(tmp_path: Path, stored: Tensors, head: Tensors) -> None:
    folder = save(tmp_path, stored, CONFIG, beside=foreign(head))
    assert classify(folder).head.source == "embedded"
    assert mx.array_equal(classify(folder).tensors["mtp.fc.weight"], head["mtp.fc.weight"])
