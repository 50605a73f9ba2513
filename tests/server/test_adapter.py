"""Guards what a server says of its adapter: to whoever asks for its models, and by name alone to everybody."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import selfdraft
from tests.support.adapters import random_updates, save_mlx_lm

from .conftest import Running, running


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    layers = {"model.layers.0.mlp.up_proj.weight": np.full((64, 64), 0.1, np.float32)}
    return save_mlx_lm(tmp_path / "private" / "pirate", random_updates(layers))


def test_models_and_health_say_it(nano_folder: Path, adapter: Path) -> None:
    with running(lambda: selfdraft.load(str(nano_folder), adapter=adapter)) as found, found.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["adapter"]["name"], model["adapter"]["method"]) == ("pirate", "LoRA")
        health = client.get("/health")
        assert health.json()["adapter"] == "pirate"
        assert "private" not in health.text + client.get("/v1/models").text


def test_without_one_they_say_none(server: Running) -> None:
    with server.client() as client:
        assert client.get("/v1/models").json()["data"][0]["adapter"] is None
        assert client.get("/health").json()["adapter"] is None
