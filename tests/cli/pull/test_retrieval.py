"""Guards pulling a model that embeds: with the folders of its steps, without other folders, and said for what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from selfdraft.hub.pins import find_pin
from selfdraft.retrieval import Embedder, plan
from selfdraft.source import find_model
from tests.support.hub import FakeHub, files_of
from tests.support.retrieval import FIXTURES

from ..conftest import Command
from .conftest import ID

STEPS = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]


@pytest.fixture
def repository(hub: FakeHub) -> dict[str, bytes]:
    files = files_of(FIXTURES / "bert") | {
        "modules.json": json.dumps(STEPS).encode(),
        "1_Pooling/config.json": b'{"pooling_mode_cls_token": true}',
        "onnx/config.json": b"{}",
        "1_Pooling/code.json": b"{}",
    }
    hub.put(ID, files)
    return files


def test_it_comes_with_its_steps_and_can_be_used(repository: dict[str, bytes], light: Command) -> None:
    ended = light("pull", ID)
    assert ended.code == 0, ended.err
    assert f"selfdraft serve --embedding-model {ID}, or --rerank-model" in ended.out.replace("\n", " ")
    folder = find_model(ID, fetch=False)
    there = {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
    assert there == set(repository) - {"onnx/config.json", "1_Pooling/code.json"}
    assert Embedder(plan(folder)).width == 32


def test_a_folder_of_a_step_cannot_lead_elsewhere(hub: FakeHub, repository: dict[str, bytes], light: Command) -> None:
    hub.put(ID, repository | {"../1_Pooling/config.json": b"{}"})
    ended = light("pull", ID)
    assert ended.code == 1
    assert "leads out of a model folder" in ended.err
    assert find_pin(ID) is None
