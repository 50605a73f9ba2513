"""Guards a loaded model with an adapter: it is another model to everything that keeps something of it, and says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import selfdraft
from selfdraft import keeping, tuned
from selfdraft.errors import CheckpointError, InvalidRequest, OutOfMemoryBudget
from selfdraft.params import SamplingParams
from selfdraft.server.config import load_server_settings
from selfdraft.settings import load_settings, settings_path
from selfdraft.settings_list import stored_form
from tests.support.adapters import random_updates, save_mlx_lm
from tests.support.checkpoints import add_text_side
from tests.support.nano import nano_model, write_checkpoint

VOCABULARY = 8192
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = nano_model(vocab_size=VOCABULARY, sharpness=3.0)
    made = write_checkpoint(tmp_path_factory.mktemp("models") / "nano", model, config={"vocab_size": VOCABULARY})
    return add_text_side(made)


@pytest.fixture(scope="module")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {f"model.layers.{layer}.mlp.up_proj.weight": np.full((64, 64), 0.1, np.float32) for layer in range(3)}
    return save_mlx_lm(tmp_path_factory.mktemp("adapters") / "pirate", random_updates(layers), model="owner/nano")


def opened(folder: Path, adapter: Path | None = None, **settings: Any) -> selfdraft.LLM:
    return selfdraft.load(str(folder), adapter=adapter, settings=load_settings(**settings))


def test_it_says_what_it_is(folder: Path, adapter: Path) -> None:
    llm = opened(folder, adapter)
    described = llm.describe()["adapter"]
    assert {name: described[name] for name in ("name", "format", "method", "ranks", "layers", "base")} == {
        "name": "pirate",
        "format": "mlx-lm",
        "method": "LoRA",
        "ranks": [4],
        "layers": 3,
        "base": "owner/nano",
    }
    assert [note for note in llm.notes if "pirate" in note and "selfdraft bench --adapter-path" in note]
    assert opened(folder).describe()["adapter"] is None


def test_drafting_changes_nothing_of_its_text(folder: Path, adapter: Path) -> None:
    llm = opened(folder, adapter)
    texts = [llm.generate("Hello", replace(GREEDY, depth=depth)).token_ids for depth in (0, 3)]
    assert texts[0] == texts[1]
    assert texts[0] != opened(folder).generate("Hello", GREEDY).token_ids


def test_nothing_that_was_kept_without_it_is_taken_with_it(folder: Path, adapter: Path, tmp_path: Path) -> None:
    plain, adapted = opened(folder), opened(folder, adapter)
    other = tmp_path / "pirate"
    layers = {"model.layers.0.mlp.up_proj.weight": np.full((64, 64), 0.1, np.float32)}
    changed = opened(folder, save_mlx_lm(other, random_updates(layers)))
    loaded = (plain, adapted, changed)
    assert len({repr(keeping._facts(llm)) for llm in loaded}) == 3
    assert len({repr(tuned.belongs_to(folder, llm.describe())) for llm in loaded}) == 3
    assert keeping._facts(adapted) == keeping._facts(opened(folder, adapter))
    assert "adapter" not in tuned.belongs_to(folder, plain.describe())  # records of before stay what they are


def test_warm_prefixes_on_disk_are_its_own(folder: Path, adapter: Path, tmp_path: Path) -> None:
    """What a model without it left there is not found, and what it left itself is."""
    prompt = list(range(100, 400))
    read = []
    for which in (None, adapter, adapter):
        llm = opened(folder, which, ssd_session_cache="on", ssd_session_cache_dir=tmp_path, prefill_chunk=64)
        disk = keeping.DiskSessions(llm)
        assert disk.ready(30)
        read.append(llm.generate(prompt, GREEDY).usage.cached_tokens)
        disk.close()
    assert read[0] == read[1] == 0
    assert read[2] > 200


def test_it_comes_from_the_environment_too(folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFDRAFT_ADAPTER_PATH", str(adapter))
    assert selfdraft.load(str(folder)).adapter is not None


@pytest.mark.parametrize("read", [load_settings, load_server_settings])
def test_it_is_not_kept_in_the_file(read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There it would be for every model."""
    monkeypatch.setenv("SELFDRAFT_CONFIG_DIR", str(tmp_path))
    settings_path().write_text('adapter_path = "/somewhere"\n')
    with pytest.raises(InvalidRequest, match="an adapter belongs to one model"):
        read()
    settings_path().unlink()
    with pytest.raises(InvalidRequest, match="an adapter belongs to one model"):
        stored_form(type(load_settings()), "adapter_path", "/somewhere")


def test_its_memory_is_asked_for(folder: Path, adapter: Path) -> None:
    """Beside that of the weights, before anything is read."""
    llm = opened(folder)
    assert llm.adapter is None
    needed = llm.loaded.nbytes
    size = opened(folder, adapter).adapter
    assert size is not None
    assert size.nbytes == 3 * 2 * 4 * 64 * 4
    with pytest.raises(OutOfMemoryBudget):
        opened(folder, adapter, memory_limit=needed + size.nbytes - 1)


def test_a_folder_that_is_none_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        opened(folder, tmp_path / "absent")


def test_an_adapter_of_bf16_computes_in_the_models_dtype(folder: Path, adapter: Path, tmp_path: Path) -> None:
    stored: Any = mx.load(str(adapter / "adapters.safetensors"))
    half = {name: tensor.astype(mx.bfloat16) for name, tensor in stored.items()}
    llm = opened(folder, save_mlx_lm(tmp_path / "half", {}, tensors=half))
    layer: Any = llm.loaded.model
    assert layer.model.layers[0].mlp.up_proj.weight.dtype == mx.float32
