"""Guards that a build goes on where it was interrupted, however it was, and that its folder appears whole or not.

What goes on must come to the same files as what was never interrupted; what is of another source, recipe or process is
not touched.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.errors import CheckpointError, SelfdraftError
from selfdraft.forge import plan as planning
from selfdraft.forge.build import build
from selfdraft.forge.recipe import Recipe
from selfdraft.forge.tensor_file import TensorWriter
from tests.support.checkpoints import save, tensors_of
from tests.support.forge import DENSE_HEAD, listing
from tests.support.nano import nano_model

SHARD = 8_000
RECIPE = Recipe.named("4bit", group_size=32, **DENSE_HEAD)
WORK = ".package.building"

KILLED = f"""
import os, signal, sys
from pathlib import Path
from selfdraft.forge import plan
from selfdraft.forge.build import build
from selfdraft.forge.recipe import Recipe
plan._SHARD_BYTES = {SHARD}
def progress(what, done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
build(Path(sys.argv[1]), Path(sys.argv[2]), Recipe.named("4bit", group_size=32, head="dense"), progress=progress)
"""


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_SHARD_BYTES", SHARD)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors = {**tensors_of(nano_model(seed=9, dtype=mx.bfloat16)), "model.visual.a.weight": mx.ones((4, 4))}
    return save(tmp_path / "source", tensors)


def interrupted(source: Path, target: Path, by: BaseException, recipe: Recipe = RECIPE) -> None:
    """Build until half is written."""

    def progress(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise by

    build(source, target, recipe, progress=progress)


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_build_that_was_killed_goes_on(tmp_path: Path, source: Path) -> None:
    target, work = tmp_path / "package", tmp_path / WORK
    killed = subprocess.run([sys.executable, "-c", KILLED, str(source), str(target)], check=False, cwd=Path.cwd())
    assert killed.returncode == -signal.SIGKILL
    assert listing(tmp_path) == {"source", WORK}
    before = times(work)
    parts = [path for path in work.iterdir() if path.name.endswith(".part")]
    assert len(before) > 2
    assert len(parts) == 1  # in the middle of a file

    told: list[int] = []
    build(source, target, RECIPE, progress=lambda what, done, total: told.append(done))
    assert listing(tmp_path) == {"source", "package"}
    after = times(target)
    assert {name: after[name] for name in before} == before
    build(source, tmp_path / "whole", RECIPE)
    assert contents(target) == contents(tmp_path / "whole")
    assert told == sorted(told)


@pytest.mark.parametrize("by", [KeyboardInterrupt(), MemoryError(), OSError(28, "No space left on device")], ids=repr)
def test_what_was_made_is_kept(tmp_path: Path, source: Path, by: BaseException) -> None:
    target, work = tmp_path / "package", tmp_path / WORK
    wanted = SelfdraftError if isinstance(by, OSError) else type(by)
    with pytest.raises(wanted) as caught:
        interrupted(source, target, by)
    if isinstance(by, OSError):
        assert "No space left on device" in str(caught.value)
        assert f"kept in {work}, and the same command goes on from it" in str(caught.value)
    assert listing(tmp_path) == {"source", WORK}
    assert not any(name.endswith(".part") for name in listing(work))
    before = times(work)
    assert len(before) > 2
    build(source, target, RECIPE)
    after = times(target)
    assert {name: after[name] for name in before} == before


def test_a_full_disk_while_a_file_is_written(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = TensorWriter.write

    def full(writer: TensorWriter, name: str, pieces: Any) -> None:
        if name.startswith("model.layers.1."):
            raise OSError(28, "No space left on device")
        write(writer, name, pieces)

    monkeypatch.setattr(TensorWriter, "write", full)
    with pytest.raises(SelfdraftError, match="No space left on device"):
        build(source, tmp_path / "package", RECIPE)
    assert listing(tmp_path) == {"source", WORK}
    monkeypatch.setattr(TensorWriter, "write", write)
    build(source, tmp_path / "package", RECIPE)
    build(source, tmp_path / "whole", RECIPE)
    assert contents(tmp_path / "package") == contents(tmp_path / "whole")


def other_recipe(source: Path) -> Recipe:
    return Recipe.named("8bit", group_size=32, **DENSE_HEAD)


def other_weights(source: Path) -> Recipe:
    save(source, tensors_of(nano_model(seed=10, dtype=mx.bfloat16)))
    return RECIPE


def other_config(source: Path) -> Recipe:
    path = source / "config.json"
    path.write_text(path.read_text().replace("{", '{"comment": "changed", ', 1))
    return RECIPE


@pytest.mark.parametrize("change", [other_recipe, other_weights, other_config])
def test_another_recipe_or_source_begins_anew(tmp_path: Path, source: Path, change: Callable[[Path], Recipe]) -> None:
    target = tmp_path / "package"
    with pytest.raises(KeyboardInterrupt):
        interrupted(source, target, KeyboardInterrupt())
    before = times(tmp_path / WORK)
    (tmp_path / WORK / "of-no-use").mkdir()
    recipe = change(source)
    build(source, target, recipe)
    after = times(target)
    assert all(after.get(name) != moment for name, moment in before.items())
    build(source, tmp_path / "whole", recipe)
    assert contents(target) == contents(tmp_path / "whole")


def test_a_file_that_is_not_what_is_wanted_is_made_again(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "package"
    with pytest.raises(KeyboardInterrupt):
        interrupted(source, target, KeyboardInterrupt())
    mx.save_safetensors(str(tmp_path / WORK / min(times(tmp_path / WORK))), {"a": mx.zeros(3)})
    build(source, target, RECIPE)
    build(source, tmp_path / "whole", RECIPE)
    assert contents(target) == contents(tmp_path / "whole")


def test_a_build_that_is_refused_leaves_nothing(tmp_path: Path, source: Path) -> None:
    with pytest.raises(CheckpointError, match="broken"):
        interrupted(source, tmp_path / "package", CheckpointError("broken"))
    assert listing(tmp_path) == {"source"}


def test_one_build_at_a_time(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "package"
    seen: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        if not seen:
            seen.append("")
            with pytest.raises(SelfdraftError, match="being made by another process: wait for it") as caught:
                build(source, target, other_recipe(source))
            seen.append(str(caught.value))
            build(source, tmp_path / "beside", RECIPE)  # another target is no concern of it

    build(source, target, RECIPE, progress=progress)
    assert str(target) in seen[1]
    assert listing(tmp_path) == {"source", "package", "beside"}
    assert contents(target) == contents(tmp_path / "beside")


def test_a_lock_that_nobody_holds_any_more_is_none(tmp_path: Path, source: Path) -> None:
    work = tmp_path / WORK
    work.mkdir()
    descriptor = os.open(work, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(SelfdraftError, match="another process"):
        build(source, tmp_path / "package", RECIPE)
    assert listing(tmp_path) == {"source", WORK}
    os.close(descriptor)
    build(source, tmp_path / "package", RECIPE)


def test_a_target_that_appears_meanwhile_is_left_alone(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "package"

    def progress(what: str, done: int, total: int) -> None:
        target.mkdir(exist_ok=True)

    with pytest.raises(SelfdraftError, match="is there already"):
        build(source, target, RECIPE, progress=progress)
    assert list(target.iterdir()) == []
    assert listing(tmp_path) == {"source", "package"}


def test_a_place_that_cannot_be_written(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in: tests may run as root, whom no permission stops."""

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SelfdraftError) as caught:
        build(source, tmp_path / "package", RECIPE)
    assert "package could not be made" in str(caught.value)
    assert "Permission denied" in str(caught.value)
    assert "kept" not in str(caught.value)
    assert listing(tmp_path) == {"source"}


def test_a_source_that_vanishes_meanwhile(tmp_path: Path, source: Path) -> None:
    def progress(what: str, done: int, total: int) -> None:
        path = source / "model.safetensors"
        if path.stat().st_size:
            path.write_bytes(b"")

    with pytest.raises(SelfdraftError, match="Unable to read"):
        build(source, tmp_path / "package", RECIPE, progress=progress)
    assert not (tmp_path / "package").exists()
