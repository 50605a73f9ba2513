"""Guards what the doctor says of settings, folders, port and models; and that looking changes nothing."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from selfdraft.doctor import folders
from selfdraft.server import instance as instances
from tests.sessions.disk.support import files, opened
from tests.sessions.disk.support import stored as store_one
from tests.support.checkpoints import add_text_side
from tests.support.nano import nano_model, write_checkpoint

from .conftest import Examined, only

KEY = "0123456789abcdef0123"


# Settings


def test_settings_that_differ_from_defaults_are_named(
    examined: Examined, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.write_text("[server]\nport = 8123\n")
    monkeypatch.setenv("SELFDRAFT_ROWS", "3")
    monkeypatch.setenv("SELFDRAFT_API_KEY", KEY)
    found = only(examined("settings"))
    assert found.status == "ok"
    assert "server.port = 8123 (settings.toml)" in found.observed
    assert "server.rows = 3 (environment)" in found.observed
    assert KEY not in found.observed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dtype =", "cannot be read as TOML"),
        ("dtyp = 1", "dtyp = 1 is no setting"),
        ("[server]\nport = 70000", "70000"),
        ("[start]\nsurface = 'hologram'", "hologram"),
        ("[sever]\nport = 1", "sever"),
    ],
)
def test_settings_that_cannot_be_used(examined: Examined, stored: Path, text: str, said: str) -> None:
    stored.write_text(text)
    found = only(examined("settings"))
    assert found.status == "fail"
    assert said in found.observed
    assert found.observed.count(said) == 1
    assert str(stored) in found.fix  # `settings set` cannot mend what it cannot read
    assert only(examined("port")).status in ("ok", "warn")  # goes on with defaults


def test_variables_that_are_no_settings(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(examined("environment")).status == "ok"
    monkeypatch.setenv("SELFDRAFT_PROT", "1")
    found = only(examined("environment"))
    assert found.status == "warn"
    assert found.fix == "unset SELFDRAFT_PROT; SELFDRAFT_PORT may be meant"


def test_access(examined: Examined, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert only(examined("access")).observed == "this machine alone, 0 API keys"
    monkeypatch.setenv("SELFDRAFT_HOST", "0.0.0.0")
    assert only(examined("access")).status == "fail"
    keys = tmp_path / "keys"
    monkeypatch.setenv("SELFDRAFT_API_KEY_FILE", str(keys))
    assert only(examined("access")).observed == f"other machines, {keys} is made by serve"
    assert not keys.exists()
    keys.write_text(f"{KEY}\n{KEY}x\n")
    keys.chmod(0o644)
    found = only(examined("access"))
    assert found.status == "fail"
    assert "can be read by others" in found.observed
    keys.chmod(0o600)
    assert only(examined("access")).observed == "other machines, 2 API keys"


# The session cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a record."""
    root = tmp_path / "cache"
    monkeypatch.setenv("SELFDRAFT_SSD_SESSION_CACHE", "on")
    monkeypatch.setenv("SELFDRAFT_SSD_SESSION_CACHE_DIR", str(root))
    store = opened(root)
    store_one(store, 2)
    store.close()
    return root


def test_a_sound_session_cache(examined: Examined, cache: Path) -> None:
    before = files(cache)
    found = only(examined("session cache"))
    assert found.status == "ok", found
    assert found.figures["records"] == 1
    assert found.figures["orphans"] == found.figures["incomplete"] == 0
    assert files(cache) == before


def test_a_session_cache_with_faults(examined: Examined, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = next((cache / "v1" / "blobs").rglob("*.safetensors"))
    (blob.parent / "left.part").write_bytes(b"x")
    found = only(examined("session cache"))
    assert found.status == "warn"
    assert (found.figures["orphans"], found.figures["incomplete"]) == (1, 0)
    assert found.fix == "selfdraft cache gc --keep all"
    blob.unlink()
    found = only(examined("session cache"))
    assert found.figures["incomplete"] == 1
    assert "selfdraft cache verify" in found.fix
    monkeypatch.setenv("SELFDRAFT_SSD_SESSION_CACHE_MAX_BYTES", "10")
    assert "more than its limit" in only(examined("session cache")).observed
    before = files(cache)
    examined("session cache")
    assert files(cache) == before  # it is not the doctor that deletes


def test_an_index_that_cannot_be_read(examined: Examined, cache: Path) -> None:
    (cache / "v1" / "index.sqlite").write_bytes(b"nonsense" * 1000)
    found = only(examined("session cache"))
    assert found.status == "warn"
    assert "cannot be read" in found.observed


def test_no_session_cache(examined: Examined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(examined("session cache")).status == "skip"  # off, as for all tests
    monkeypatch.setenv("SELFDRAFT_SSD_SESSION_CACHE", "on")
    monkeypatch.setenv("SELFDRAFT_SSD_SESSION_CACHE_DIR", str(tmp_path / "not" / "there"))
    assert only(examined("session cache")).status == "ok"
    assert not (tmp_path / "not").exists()
    monkeypatch.setenv("SELFDRAFT_SSD_SESSION_CACHE_DIR", "/dev/null/x")
    found = only(examined("session cache"))
    assert found.status == "warn"
    assert "ssd_session_cache_dir" in found.fix


def test_whether_a_folder_can_be_written_is_told_by_trying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders.write_problem(tmp_path) == folders.write_problem(tmp_path / "a" / "b") == ""
    assert list(tmp_path.iterdir()) == []

    def full(**given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.tempfile, "TemporaryFile", full)
    assert folders.write_problem(tmp_path) == f"{tmp_path}: No space left on device"


# The Hub's cache


def test_the_hub_cache(examined: Examined, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=30e9))
    found = only(examined("hub cache"))
    assert (found.status, found.observed) == ("ok", f"{tmp_path / 'hub'}: 30 GB free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3e9))
    assert only(examined("hub cache")).status == "warn"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/dev/null/hub")
    assert "HF_HOME" in only(examined("hub cache")).fix


# The port


def test_the_port(examined: Examined, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(instances, "_path", lambda: tmp_path / "server.json")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("SELFDRAFT_PORT", str(port))
        found = only(examined("port"))
        assert found.status == "warn"
        assert f"{port} on 127.0.0.1 is taken by" in found.observed
        assert f"process {os.getpid()}" in found.observed
        with instances.noted("127.0.0.1", port, "reference"):
            found = only(examined("port"))
            assert found.status == "ok"
            assert f"process {os.getpid()}, with reference" in found.observed

        def denied(kind: str) -> None:
            raise psutil.AccessDenied

        monkeypatch.setattr(psutil, "net_connections", denied)
        assert "is taken by another program" in only(examined("port")).observed
    assert only(examined("port")).observed == f"{port} on 127.0.0.1 is free"
    monkeypatch.setenv("SELFDRAFT_HOST", "192.0.2.1")
    assert only(examined("port")).status == "warn"


# A model


def test_a_model(examined: Examined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(examined("model")).status == "skip"
    found = examined("model", model="reference")
    assert [(each.name, each.status) for each in found] == [
        ("model", "ok"),
        ("model head", "ok"),
        ("model memory", "ok"),
    ]
    headless = add_text_side(write_checkpoint(tmp_path / "nano", nano_model(with_head=False)))
    _, head, _ = examined("model", model=str(headless))
    assert head.status == "warn"
    assert "no mtp tensors" in head.observed
    monkeypatch.setenv("SELFDRAFT_MEMORY_LIMIT", "1MiB")
    *_, room = examined("model", model="reference")
    assert room.status == "fail"
    assert "the weights need" in room.observed
    assert room.fix.startswith("raise it")
    (headless / "config.json").write_text("{}")
    assert only(examined("model", model=str(headless))).status == "fail"


def test_no_model_is_downloaded(examined: Examined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[object] = []

    def download(*given: object, **how: object) -> str:
        asked.append(how["local_files_only"])
        raise OSError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = only(examined("model", model="owner/name"))
    assert found.status == "fail"
    assert "not among the models that were downloaded" in found.observed
    assert asked == [True]
