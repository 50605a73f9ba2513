"""Guards what `selfdraft pull` refuses: models that cannot run, names that lead nowhere, full disks, pins that lie."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from selfdraft.errors import CheckpointError, ModelNotFound
from selfdraft.hub import transfer
from selfdraft.hub.cache import cache_folder, repository_folder
from selfdraft.hub.pins import find_pin, pins_folder
from selfdraft.source import find_model
from tests.support.checkpoints import save, tensors_of
from tests.support.hub import FakeHub, files_of
from tests.support.nano import NANO_CONFIG, nano_model

from ..conftest import Command
from .conftest import ID, SHARD, Files, is_a_model, there

# What cannot run


def refused(light: Command, said: str) -> None:
    ended = light("pull", ID)
    assert ended.code == 1
    assert ended.out == ""
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert there() == []  # nothing is left behind
    assert find_pin(ID) is None


def test_a_family_that_is_not_supported_is_refused_before_its_weights(
    hub: FakeHub, files: Files, light: Command
) -> None:
    hub.put(ID, files | {"config.json": b'{"model_type": "llama"}'})
    refused(light, "model_type 'llama' is not supported")
    assert hub.fetched(SHARD) == []


def test_nor_are_its_weights_fetched_by_loading_it(hub: FakeHub, files: Files) -> None:
    hub.put(ID, files | {"config.json": b'{"model_type": "llama"}'})
    with pytest.raises(CheckpointError, match="model_type 'llama' is not supported"):
        find_model(ID)
    assert hub.fetched(SHARD) == []
    hub.put(ID, files)
    assert (find_model(ID) / SHARD).exists()
    assert find_pin(ID) is None  # only a pull pins


def test_loading_what_is_not_on_the_hub(hub: FakeHub) -> None:
    hub.gated.add(ID)
    with pytest.raises(ModelNotFound, match="is gated: ask for access"):
        find_model(ID)
    with pytest.raises(ModelNotFound, match="no 'owner/absent' on the Hugging Face Hub; check the name"):
        find_model("owner/absent")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": "model-00009-of-00009.safetensors"}}, "model-00009-of-00009.safetensors is named in the"),
        (
            {"weight_map": {"a": "../../../evil.safetensors"}},
            "'../../../evil.safetensors', which is no safetensors file",
        ),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "'pytorch_model.bin', which is no safetensors file"),
        ({"weight_map": ["a"]}, "weight_map does not map tensors to files"),
    ],
)
def test_an_index_that_lies_is_refused_before_the_weights(
    hub: FakeHub, files: Files, light: Command, index: dict[str, Any], said: str
) -> None:
    hub.put(ID, files | {"model.safetensors.index.json": json.dumps(index).encode()})
    refused(light, said)
    assert hub.fetched(SHARD) == []


def truncated(files: Files) -> Files:
    return files | {SHARD: files[SHARD][:-1]}


def without_a_shard(files: Files) -> Files:
    index = json.loads(files["model.safetensors.index.json"])
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != SHARD}
    return {name: each for name, each in files.items() if name != SHARD} | {
        "model.safetensors.index.json": json.dumps(index).encode()
    }


def a_pickle(files: Files) -> Files:
    return files | {SHARD: b"\x80\x04\x95" + bytes(200)}


def config_twice(files: Files) -> Files:
    return files | {"config.json": files["config.json"].replace(b"{", b'{"vocab_size": 17, ', 1)}


def config_of_another(files: Files) -> Files:
    config = json.loads(files["config.json"])
    return files | {"config.json": json.dumps(config | {"intermediate_size": 96}).encode()}


@pytest.mark.parametrize("broken", [truncated, without_a_shard, a_pickle, config_twice, config_of_another])
def test_a_checkpoint_broken_on_the_hub_leaves_nothing_behind(
    hub: FakeHub, files: Files, light: Command, broken: Any
) -> None:
    hub.put(ID, broken(files))
    refused(light, "selfdraft: ")


def test_what_was_there_before_stays_when_it_cannot_run(
    hub: FakeHub, files: Files, other: Files, light: Command
) -> None:
    light("pull", ID)
    before = there()
    hub.put(ID, other | {"config.json": b'{"model_type": "llama"}'})
    assert light("pull", ID).code == 1
    assert [name for name in there() if not name.startswith("trees/")] == [
        name for name in before if not name.startswith("trees/")
    ]
    assert files_of(find_model(ID)) == files


@pytest.mark.parametrize("lacking", ["config.json", ".safetensors"])
def test_a_repository_that_is_no_model(hub: FakeHub, files: Files, light: Command, lacking: str) -> None:
    kept = {name: each for name, each in files.items() if not name.endswith(lacking)}
    hub.put(ID, kept | {"pytorch_model.bin": b"pickle"})
    refused(light, f"no {lacking}")


# What cannot be had


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("owner/absent", "no 'owner/absent' on the Hugging Face Hub; check the name"),
        (f"{ID}@v9", "'owner/nano' has no revision 'v9'"),
        ("gated/model", "'gated/model' is gated: ask for access"),
        ("nonsense", "'nonsense' is no id on the Hugging Face Hub"),
        (f"{ID}@../../x", "is no id on the Hugging Face Hub"),
        ("reference", "'reference' is no id"),
    ],
)
def test_names_that_lead_nowhere(hub: FakeHub, light: Command, name: str, said: str) -> None:
    hub.gated.add("gated/model")
    ended = light("pull", name)
    assert (ended.code, ended.out) == (1, "")
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1
    assert not cache_folder().exists()


def test_a_hub_that_is_down_or_unreachable(hub: FakeHub, light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.status = 500
    assert "the Hugging Face Hub answered 500; try again later" in light("pull", ID).err
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    ended = light("pull", ID)
    assert ended.code == 1
    assert "the Hugging Face Hub cannot be reached (ConnectError" in ended.err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "nothing is fetched while HF_HUB_OFFLINE is set" in light("pull", ID).err


def test_a_disk_too_small_is_said_before_anything_is_fetched(
    hub: FakeHub, files: Files, light: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    needed = sum(map(len, files.values())) + 1_000_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed - 1))
    ended = light("pull", ID)
    assert ended.code == 1
    assert f"needs {needed:,} bytes" in ended.err
    assert "set HF_HOME to a folder on another disk" in ended.err
    assert not cache_folder().exists()
    assert "TOO BIG" in light("pull", "--dry-run", ID).err
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, needed))
    assert light("pull", ID).code == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 0))
    assert light("pull", ID).code == 0  # nothing is missing


def test_a_disk_that_fills_up_meanwhile(hub: FakeHub, files: Files, light: Command, monkeypatch: Any) -> None:
    receive = transfer._stream

    def full(listing: Any, file: Any, content: Any, count: Any, stop: Any) -> None:
        if file.name == SHARD:
            raise OSError(errno.ENOSPC, "No space left on device")
        receive(listing, file, content, count, stop)

    monkeypatch.setattr(transfer, "_stream", full)
    ended = light("pull", ID)
    assert ended.code == 1
    assert "No space left on device" in ended.err
    assert f"`selfdraft pull {ID}` goes on from there" in ended.err
    assert not is_a_model()
    monkeypatch.undo()


# Pins


def test_a_pinned_model_that_was_deleted_is_not_fetched_unasked(hub: FakeHub, light: Command) -> None:
    light("pull", ID)
    shutil.rmtree(repository_folder(ID))
    hub.asked.clear()
    with pytest.raises(ModelNotFound, match=r"is pinned to commit [0-9a-f]{40}, which is not in .* any more"):
        find_model(ID)
    assert hub.asked == []


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"schema_version": 1, "repository": "owner/nano", "revision": "main", "commit": "../../x"}'],
)
def test_a_damaged_pin_is_none(hub: FakeHub, light: Command, content: str, caplog: Any) -> None:
    light("pull", ID)
    (path,) = pins_folder().iterdir()
    path.write_text(content)
    assert find_pin(ID) is None
    assert "is no pin of `selfdraft pull` that can be used" in caplog.text


def test_a_pin_that_cannot_be_written_is_said(hub: FakeHub, light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", f"{os.devnull}/x")
    ended = light("pull", ID)
    assert ended.code == 1
    assert "cannot be written" in ended.err
    assert "nothing is pinned" in ended.err


# Folders on this disk obey the same rules


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "../x.safetensors"}}',
            "no safetensors file of this folder",
        ),
        ("config.json", '{"model_type": "qwen3_5_text", "model_type": "llama"}', "'model_type' stands there twice"),
        ("config.json", "[" * 100_000, "nested too deeply"),
        ("config.json", json.dumps({**NANO_CONFIG, "quantization_config": "fp8"}), "quantization_config"),
        ("config.json", json.dumps({**NANO_CONFIG, "hidden_size": 2**40}), "config.json describes no model"),
        ("config.json", json.dumps({**NANO_CONFIG, "head_dim": -1}), "config.json describes no model"),
        ("config.json", json.dumps({**NANO_CONFIG, "rms_norm_eps": 0}), "config.json describes no model"),
    ],
)
def test_folders_that_lie(tmp_path: Path, file: str, content: str, said: str) -> None:
    from selfdraft.models.checkpoint import classify

    folder = save(tmp_path / "model", tensors_of(nano_model(0)))
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=said):
        classify(folder)


def test_a_tensor_twice_in_one_file(tmp_path: Path) -> None:
    from selfdraft.models.checkpoint import classify

    folder = save(tmp_path / "model", tensors_of(nano_model(0)))
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    first = next(name for name in json.loads(header) if name != "__metadata__")
    again = header[:-1] + b"," + json.dumps({first: json.loads(header)[first]}).encode()[1:]
    path.write_bytes(len(again).to_bytes(8, "little") + again + content[8 + length :])
    with pytest.raises(CheckpointError, match="stands there twice"):
        classify(folder)
