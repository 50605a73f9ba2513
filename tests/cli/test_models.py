"""Guards `selfdraft models`: every model on this machine once, from wherever it lies, and no place can hold it up."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selfdraft.catalogue import CATALOGUE, MEMORIES
from selfdraft.cli import places
from selfdraft.cli.found_models import find_models, memory_for
from selfdraft.cli.places import ModelSettings, Place, all_places, look
from selfdraft.errors import InvalidRequest
from selfdraft.hub.names import parse
from selfdraft.models import architecture
from selfdraft.settings import checked, load_settings
from tests.support.checkpoints import save, tensors_of
from tests.support.hub import FakeHub, fake_hub, files_of, use
from tests.support.nano import nano_model

from .conftest import Command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "nano", tensors_of(nano_model(0)))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> Iterator[FakeHub]:
    """A user with an empty home and an empty cache, and no disks."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(places, "_disks", lambda: [])
    with fake_hub() as hub:
        use(hub.url, tmp_path / "hf", monkeypatch)
        hub.put("owner/nano", files_of(model))
        yield hub


def listed(light: Command) -> dict[str, dict[str, Any]]:
    report = json.loads(light("models", "--json").out)
    assert report["schema_version"] == 1
    return {each["model"]: each for each in report["models"]}


def test_every_kind_is_found_once(
    hub: FakeHub, tmp_path: Path, model: Path, light: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    light("pull", "owner/nano")
    commit = "c" * 40
    other = tmp_path / "hf/hub/models--owner--other"
    shutil.copytree(model, other / "snapshots" / commit)
    (other / "refs").mkdir()
    (other / "refs/main").write_text(commit)
    shutil.copytree(model, tmp_path / "models/local")
    mine = shutil.copytree(model, tmp_path / "elsewhere/mine")
    disk = tmp_path / "disk"
    shutil.copytree(model, disk / "llm/owner/deep")
    shutil.copytree(model, disk / "hf/hub/models--a--b/snapshots" / commit)
    shutil.copytree(model, disk / ".Trashes/gone")
    (disk / "link").symlink_to(mine)  # the same folder again
    monkeypatch.setattr(places, "_disks", lambda: [disk])
    monkeypatch.setenv("SELFDRAFT_MODEL_FOLDERS", f"{tmp_path / 'elsewhere'}{os.pathsep}{tmp_path / 'absent'}")
    found = listed(light)
    assert {name: each["kind"] for name, each in found.items()} == {
        "reference": "bundled",
        str(tmp_path / "models/local"): "folder",
        str(mine): "folder",
        str(disk / "hf/hub/models--a--b/snapshots" / commit): "disk",
        str(disk / "llm/owner/deep"): "disk",
        "owner/nano": "pulled",
        "owner/other": "cached",
    }
    assert found["owner/nano"]["pinned"]
    assert not found["owner/other"]["pinned"]
    assert found["owner/other"]["commit"] == commit
    assert found["reference"]["commit"] is None
    assert all(each["head"]["usable"] and each["fits_memory"] for each in found.values())


def test_the_cache_is_not_listed_again_where_a_place_holds_it(
    hub: FakeHub, tmp_path: Path, light: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    light("pull", "owner/nano")
    monkeypatch.setenv("SELFDRAFT_MODEL_FOLDERS", str(tmp_path / "hf"))
    assert set(listed(light)) == {"reference", "owner/nano"}


def test_a_name_that_is_pinned_is_not_given_to_another_commit(
    hub: FakeHub, tmp_path: Path, light: Command, model: Path
) -> None:
    light("pull", "owner/nano")
    repository = tmp_path / "hf/hub/models--owner--nano"
    shutil.rmtree(repository)
    shutil.copytree(model, repository / "snapshots" / ("d" * 40))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("d" * 40)
    assert set(listed(light)) == {"reference", f"owner/nano@{'d' * 40}"}


def test_for_people(hub: FakeHub, tmp_path: Path, model: Path, light: Command) -> None:
    light("pull", "owner/nano")
    broken = shutil.copytree(model, tmp_path / "models/broken")
    (broken / "config.json").write_text('{"model_type": "llama"}')
    ended = light("models")
    assert ended.code == 0
    head, *rows = ended.out.splitlines()
    assert head.split() == ["model", "kind", "size", "MTP", "head", "memory", "commit"]
    (pulled,) = [row for row in rows if row.startswith("owner/nano")]
    assert pulled.endswith(" pinned")
    assert "fits: 513 MB" in pulled
    (lame,) = [row for row in rows if row.startswith(str(broken))]
    assert "cannot run" in lame
    assert f"{broken} cannot run: model_type 'llama' is not supported" in ended.err


def test_a_name_does_not_drive_the_terminal(hub: FakeHub, tmp_path: Path, model: Path, light: Command) -> None:
    broken = shutil.copytree(model, tmp_path / "models/red\x1b[31m\nrow")
    (broken / "config.json").write_text('{"model_type": "llama"}')
    ended = light("models")
    assert "\x1b" not in ended.out + ended.err
    assert "red\\x1b[31m\\nrow" in ended.out
    assert "red\\x1b[31m row cannot run" in ended.err


def test_what_is_too_big_is_said(hub: FakeHub, light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfdraft.memory.free_memory", lambda: 400_000_000)
    assert "TOO BIG: " in light("models").out
    assert not listed(light)["reference"]["fits_memory"]


# Places


def test_a_disk_that_sleeps_holds_nobody_up(
    hub: FakeHub, tmp_path: Path, model: Path, light: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model, tmp_path / "models/local")
    asleep, awake = tmp_path / "asleep", threading.Event()
    scandir = os.scandir

    def slow(path: Any) -> Any:
        if str(path).startswith(str(asleep)):
            awake.wait(30)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", slow)
    monkeypatch.setattr(places, "_SECONDS", 0.3)
    monkeypatch.setattr(places, "_disks", lambda: [asleep])
    begin = time.monotonic()
    ended = light("models", "--json")
    awake.set()
    assert time.monotonic() - begin < 10
    assert f"{asleep} did not answer in time" in ended.err
    assert str(tmp_path / "models/local") in ended.out


def test_a_huge_disk_is_not_looked_through_to_the_end(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each folder takes a third of the time there is: the first is looked at, those after it are not."""
    for name in ("a", "b", "c", "d", "e", "f"):
        shutil.copytree(model, tmp_path / name / "model")
    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    found = list(places._models_below(tmp_path, 2, deadline=3.0))
    assert found == [tmp_path / "a/model"]
    monkeypatch.undo()
    silent: list[Path] = []
    monkeypatch.setattr(places, "_SECONDS", -1.0)
    look([Place(tmp_path)], silent.append)
    assert silent == [tmp_path]


def test_places_are_looked_at_shallowly(tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, tmp_path / "a/b/c/four")
    shutil.copytree(model, tmp_path / "a/b/three")
    shutil.copytree(model, tmp_path / "a/two")
    assert [folder.name for _, folder in look([Place(tmp_path)], lambda place: None)] == ["two"]
    assert [folder.name for _, folder in look([Place(tmp_path, "disk")], lambda place: None)] == ["three", "two"]
    assert [folder.name for _, folder in look([Place(tmp_path / "a/two")], lambda place: None)] == ["two"]


def test_disks_are_those_that_are_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"/Volumes": ["Backup", "Macintosh HD"], "/media/me": ["stick"], "/mnt": ["b", "a", ".hidden"]}

    def listdir(path: Any) -> list[str]:
        if str(path) not in names:
            raise FileNotFoundError(path)
        return names[str(path)]

    monkeypatch.setattr("getpass.getuser", lambda: "me")
    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr("sys.platform", "linux")
    assert [str(disk) for disk in places._disks()] == ["/mnt/a", "/mnt/b", "/media/me/stick"]
    monkeypatch.setattr("sys.platform", "darwin")
    assert [str(disk) for disk in places._disks()] == ["/Volumes/Backup", "/Volumes/Macintosh HD"]


def test_the_disk_of_the_system_is_not_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "Macintosh HD").symlink_to("/")
    assert look([Place(tmp_path / "Macintosh HD", "disk")], lambda place: None) == []


def test_folders_come_from_the_environment_or_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFDRAFT_CONFIG_DIR", str(tmp_path))
    (tmp_path / "settings.toml").write_text('[models]\nmodel_folders = ["/a", "~/b"]\n')
    settings = checked(ModelSettings, {})
    assert settings.model_folders == (Path("/a"), Path("~/b"))
    assert Path("~/b").expanduser() in [place.folder for place in all_places(settings)]
    monkeypatch.setenv("SELFDRAFT_MODEL_FOLDERS", f"/c{os.pathsep}{os.pathsep}/d")
    assert checked(ModelSettings, {}).model_folders == (Path("/c"), Path("/d"))
    monkeypatch.delenv("SELFDRAFT_MODEL_FOLDERS")
    (tmp_path / "settings.toml").write_text("[models]\nmodel_folders = 7\n")
    with pytest.raises(InvalidRequest, match="model_folders"):
        checked(ModelSettings, {})
    (tmp_path / "settings.toml").write_text('[models]\nfolders = ["/a"]\n')
    with pytest.raises(InvalidRequest, match="there is model_folders"):
        checked(ModelSettings, {})


def test_without_any_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "absent"))
    assert [each.kind for each in find_models(load_settings(), places=())] == ["bundled"]


# The catalogue


def test_the_catalogue_holds_ids_and_sizes_that_can_be() -> None:
    assert len({entry.id for entry in CATALOGUE}) == len(CATALOGUE)
    for entry in CATALOGUE:
        assert parse(entry.id) is not None, entry
        stored = entry.parameters * 1e9 * entry.bits / 8
        assert 0.95 * stored < entry.bytes < 1.25 * stored, entry  # a quantised one has scales
        assert memory_for(entry.bytes) < 0.75e9 * MEMORIES[-1]


def test_the_catalogue_says_what_fits_here(hub: FakeHub, light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFDRAFT_DTYPE", "bfloat16")
    monkeypatch.setattr("selfdraft.memory.free_memory", lambda: 22_000_000_000)
    report = json.loads(light("models", "--catalogue", "--json").out)
    offered = {each["model"]: each for each in report["catalogue"]}
    assert list(offered) == [entry.id for entry in CATALOGUE]
    nine, large = offered["Qwen/Qwen3.5-9B"], offered["Qwen/Qwen3.6-27B"]
    assert (nine["fits_memory"], nine["machine_gb"], nine["memory_bytes"]) == (True, 32, memory_for(19.3e9))
    assert (large["fits_memory"], large["machine_gb"]) == (False, 96)
    for entry in CATALOGUE:
        assert offered[entry.id]["supported"] == (architecture(entry.model_type) is not None)
    ended = light("models", "--catalogue")
    rows = {row.split()[0]: row for row in ended.out.splitlines()}
    assert rows["Qwen/Qwen3.5-9B"].endswith(" fits")
    assert rows["Qwen/Qwen3.6-27B"].endswith("too big: needs 61.7 GB")
    monkeypatch.setenv("SELFDRAFT_DTYPE", "float32")  # which makes dense weights twice as large
    assert "too big: needs 43.0 GB" in light("models", "--catalogue").out
    assert (
        memory_for(15.4e9) == json.loads(light("models", "--catalogue", "--json").out)["catalogue"][6]["memory_bytes"]
    )


def test_the_catalogue_says_what_cannot_run_yet_and_what_is_here(
    hub: FakeHub, light: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("Qwen/Qwen3.5-0.8B", files_of(model))
    light("pull", "Qwen/Qwen3.5-0.8B")
    monkeypatch.setattr("selfdraft.models.architecture", lambda name: None if "moe" in name else object())
    rows = {row.split()[0]: row for row in light("models", "--catalogue").out.splitlines()}
    assert "its family is not supported yet" in rows["Qwen/Qwen3.6-35B-A3B"]
    assert rows["Qwen/Qwen3.5-0.8B"].endswith("fits, is here already")
