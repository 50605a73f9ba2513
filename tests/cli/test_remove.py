"""Guards `selfdraft remove`: it deletes what it names in the Hugging Face cache, after a yes, and nothing elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from selfdraft.hub.cache import cache_folder, repository_folder
from selfdraft.hub.pins import find_pin
from selfdraft.source import REFERENCE, find_model
from tests.support.checkpoints import save, tensors_of
from tests.support.hub import FakeHub, commit_of, fake_hub, files_of, use
from tests.support.nano import nano_model

from .conftest import Command

ID = "owner/nano"
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return files_of(save(tmp_path_factory.mktemp("models") / "nano", tensors_of(nano_model(0))))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Files, light: Command) -> Iterator[FakeHub]:
    """A user who pulled a model."""
    with fake_hub() as hub:
        use(hub.url, tmp_path, monkeypatch)
        hub.put(ID, files)
        light("pull", ID)
        yield hub


def test_a_model_goes_with_its_pin(hub: FakeHub, light: Command) -> None:
    commit = find_model(ID).name
    ended = light("remove", "--yes", ID)
    assert ended.code == 0
    assert f"{ID} {commit}, pinned\n" in ended.out
    assert "kB deleted, its pin dropped" in ended.out
    assert not repository_folder(ID).exists()
    assert find_pin(ID) is None


@pytest.mark.parametrize(
    ("answer", "goes"), [(b"y\n", True), (b"YES\n", True), (b"n\n", False), (b"\n", False), (b"", False)]
)
def test_it_asks(hub: FakeHub, light: Command, answer: bytes, goes: bool) -> None:
    ended = light("remove", ID, stdin=answer)
    assert "delete" in ended.out
    assert repository_folder(ID).exists() != goes
    assert (find_pin(ID) is None) == goes
    assert ended.code == (0 if goes else 1)
    assert ("nothing is deleted; --yes answers" in ended.err) != goes


def test_one_revision_of_several(hub: FakeHub, files: Files, light: Command) -> None:
    old = find_model(ID).name
    new = hub.put(ID, files | {"generation_config.json": b"{}"})
    light("pull", ID)
    ended = light("remove", "-y", f"{ID}@{old}")
    assert ended.code == 0
    assert old in ended.out
    assert new not in ended.out
    assert find_model(ID).name == new  # and what both share is still there
    assert {name: each for name, each in files_of(find_model(ID)).items() if name in files} == files
    assert light("remove", "-y", f"{ID}@main").code == 0
    assert find_pin(ID) is None
    assert not repository_folder(ID).exists()


def test_a_copy_under_another_name_stays(hub: FakeHub, files: Files, light: Command) -> None:
    """A repository that was duplicated on the Hub has the same commits."""
    copies = [f"{name}/copy" for name in "abcdefgh"]  # in whatever order the cache is gone through
    for copy in copies:
        hub.put(copy, files)
        light("pull", copy)
    assert find_model(copies[0]).name == find_model(ID).name
    assert light("remove", "--yes", ID).code == 0
    assert not repository_folder(ID).exists()
    assert all((find_model(copy) / "config.json").exists() for copy in copies)


def test_a_folder_of_the_cache(hub: FakeHub, files: Files, light: Command) -> None:
    old = find_model(ID)
    hub.put(ID, files | {"generation_config.json": b"{}"})
    light("pull", ID)
    assert light("remove", "-y", str(old)).code == 0
    assert not old.exists()
    assert find_model(ID).exists()
    assert light("remove", "-y", str(repository_folder(ID))).code == 0
    assert not repository_folder(ID).exists()


def test_nothing_outside_the_cache_is_touched(hub: FakeHub, light: Command, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(find_model(ID), tmp_path / "mine"))
    for path in (folder, folder / "config.json", cache_folder(), tmp_path):
        ended = light("remove", "--yes", str(path))
        assert ended.code == 1
        assert "is no model in the Hugging Face cache" in ended.err
        assert "delete the folder yourself" in ended.err
    assert files_of(folder)
    assert find_model(ID).exists()


def test_the_bundled_model_stays(hub: FakeHub, light: Command) -> None:
    ended = light("remove", "--yes", REFERENCE)
    assert ended.code == 1
    assert "part of this package and stays" in ended.err
    assert find_model(REFERENCE).exists()


@pytest.mark.parametrize("name", ["owner/absent", f"{ID}@v9", "nonsense", "/no/such/folder"])
def test_what_is_not_there(hub: FakeHub, light: Command, name: str) -> None:
    ended = light("remove", "--yes", name)
    assert ended.code == 1
    assert "`selfdraft models` lists" in ended.err
    assert find_model(ID).exists()


def test_a_pin_alone_is_dropped(hub: FakeHub, light: Command) -> None:
    shutil.rmtree(repository_folder(ID))
    ended = light("remove", ID)
    assert ended.code == 0
    assert "nothing of it was in the cache, its pin dropped" in ended.out
    assert find_pin(ID) is None


def test_what_a_pull_left_unfinished(hub: FakeHub, files: Files, light: Command) -> None:
    shutil.rmtree(repository_folder(ID))
    hub.put(ID, files)
    part = repository_folder(ID) / "blobs" / f"{'a' * 64}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(5_000_000))
    ended = light("remove", "-y", ID)
    assert ended.code == 0
    assert "5 MB deleted" in ended.out
    assert not repository_folder(ID).exists()
    light("pull", ID)
    part.write_bytes(bytes(5_000_000))
    assert "5 MB deleted" in light("remove", "-y", ID).out  # counted beside what is whole
    assert not repository_folder(ID).exists()


def test_what_cannot_be_deleted_is_said(hub: FakeHub, light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.DeleteCacheStrategy.execute", lambda strategy: None)
    ended = light("remove", "-y", ID)
    assert ended.code == 1
    assert "cannot be deleted; look at its permissions" in ended.err
    assert find_pin(ID) is not None


def test_another_revision_leaves_the_pin(hub: FakeHub, files: Files, light: Command) -> None:
    new = hub.put(ID, files | {"generation_config.json": b"{}"})
    light("pull", ID)
    light("remove", "-y", f"{ID}@{commit_of(files)}")
    pin = find_pin(ID)
    assert pin is not None
    assert pin.commit == new
