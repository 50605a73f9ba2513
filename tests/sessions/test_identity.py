"""Whatever changes a state's bits changes the identity; nothing else does, and large files are read once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from selfdraft.sessions import identity as module
from selfdraft.sessions.identity import identity

FACTS: dict[str, Any] = {"dtype": "float32", "quantisation": {"dense": 3}, "head": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "README.md"):
        (folder / name).write_bytes(name.encode() * 100)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_file_is_another_model(folder: Path, tmp_path: Path, name: str) -> None:
    before = identity(folder, FACTS, tmp_path / "notes")
    content = bytearray((folder / name).read_bytes())
    content[50] ^= 1
    (folder / name).write_bytes(content)
    os.utime(folder / name, ns=(1, 1))  # the same size, and a clock that went back
    assert identity(folder, FACTS, tmp_path / "notes") != before


@pytest.mark.parametrize("fact", [{"dtype": "bfloat16"}, {"head": False}, {"quantisation": {"4-bit": 3}}, {"mlx": "9"}])
def test_a_changed_fact_is_another_model(folder: Path, tmp_path: Path, fact: dict[str, Any]) -> None:
    assert identity(folder, {**FACTS, **fact}, tmp_path / "notes") != identity(folder, FACTS, tmp_path / "notes")


def test_a_changed_layout_is_another_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(folder, FACTS, tmp_path / "notes")
    monkeypatch.setattr(module, "LAYOUT", module.LAYOUT + 1)
    assert identity(folder, FACTS, tmp_path / "notes") != before


def test_what_no_state_hangs_on_changes_nothing(folder: Path, tmp_path: Path) -> None:
    before = identity(folder, FACTS, tmp_path / "notes")
    (folder / "README.md").write_text("other words")
    folder.rename(tmp_path / "moved")
    assert identity(tmp_path / "moved", FACTS, tmp_path / "other notes") == before


def test_weights_in_a_folder_below_count(folder: Path, tmp_path: Path) -> None:
    (folder / "parts").mkdir()
    (folder / "parts" / "one.safetensors").write_bytes(b"1" * 99)
    before = identity(folder, FACTS, tmp_path / "notes")
    (folder / "parts" / "one.safetensors").write_bytes(b"2" * 99)
    assert identity(folder, FACTS, tmp_path / "notes") != before


def test_a_file_that_is_named_like_a_digest_is_read_all_the_same(folder: Path, tmp_path: Path) -> None:
    path = folder / f"{'a' * 64}"
    path.write_bytes(b"1" * 99)
    (folder / "linked.safetensors").symlink_to(path)
    before = identity(folder, FACTS, tmp_path / "notes")
    path.write_bytes(b"2" * 99)
    os.utime(path, ns=(1, 1))
    assert identity(folder, FACTS, tmp_path / "notes") != before


def test_files_are_read_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(folder, FACTS, tmp_path / "notes")
    monkeypatch.setattr(hashlib, "sha256", _no_file(hashlib.sha256))
    assert identity(folder, FACTS, tmp_path / "notes") == before


def _no_file(real: Any) -> Any:
    def sha256(*data: bytes) -> Any:
        assert data, "a file is being read"
        return real(*data)

    return sha256


def test_names_of_the_hugging_face_cache_are_digests(folder: Path, tmp_path: Path) -> None:
    content = b"weights" * 99
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    (folder / "model.safetensors").write_bytes(content)
    plain = identity(folder, FACTS, tmp_path / "notes")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(blob)
    assert identity(folder, FACTS, tmp_path / "notes") == plain


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"x": 3, "y": "no digest"}', b"\xff"])
def test_a_notebook_of_no_use_is_begun_anew(folder: Path, tmp_path: Path, content: bytes) -> None:
    before = identity(folder, FACTS, tmp_path / "notes")
    (tmp_path / "bad").write_bytes(content)
    assert identity(folder, FACTS, tmp_path / "bad") == before
    assert (tmp_path / "bad").read_bytes() == (tmp_path / "notes").read_bytes()


def test_a_notebook_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert identity(folder, FACTS, tmp_path / "file" / "notes") == identity(folder, FACTS, tmp_path / "notes")
