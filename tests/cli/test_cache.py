"""`selfdraft cache`: list, verify, clear and gc, alone with the folder and beside a process that uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from selfdraft.cli.app import app
from selfdraft.sessions.disk import upkeep
from selfdraft.sessions.disk.archive import Archive
from selfdraft.sessions.disk.catalogue import Entry
from selfdraft.sessions.disk.store import DiskStore

from ..sessions.disk.support import change, files, opened, right_ones, stored
from .conftest import Command
from .test_help import help_of

NEWER, OLDER = "aa" * 32, "bb" * 32


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two records of one model and one of another that was used before."""
    root = tmp_path / "cache"
    monkeypatch.setenv("SELFDRAFT_SSD_SESSION_CACHE_DIR", str(root))
    store = opened(root, identity=OLDER, model="old/model")
    stored(store, 1, scope="someone else")
    store.close()
    store = opened(root, identity=NEWER, model="new/model")
    stored(store, 3, stored(store, 2), ids=[3, 300, 7, 8])
    store.close()
    return root


@pytest.fixture
def server(root: Path) -> Iterator[DiskStore]:
    """A process that writes there: this one."""
    store = opened(root, identity=NEWER)
    yield store
    store.close()


def spoil(root: Path) -> Path:
    """Damage a file of the first record of the newer model."""
    store = opened(root, identity=NEWER)
    entry = store.records()[0][1].entry
    store.close()
    assert entry
    name = min(entry.row.blobs)
    path = root / "v1" / "blobs" / name[:2] / f"{name}.safetensors"
    change(path, lambda content: content.__setitem__(-1, content[-1] ^ 1))
    return path


def test_list(light: Command, root: Path) -> None:
    ended = light("cache", "list")
    assert (ended.code, ended.err) == (0, "")
    first, heads, newer, older = ended.out.splitlines()
    assert first.startswith(f"{root}: 0.")
    assert first.endswith(" of 21,474.8 MB")
    assert heads.split() == ["model", "identity", "owner", "records", "tokens", "size"]
    assert newer.split() == ["new/model", "a" * 12, "me", "2", "6", "0.0", "MB"]
    assert older.split() == ["old/model", "b" * 12, "someone", "else", "1", "2", "0.0", "MB"]


def test_list_as_json(light: Command, root: Path) -> None:
    report = json.loads(light("cache", "list", "--json").out)
    newer, older = report.pop("groups")
    assert report == {
        "schema_version": 1,
        "folder": str(root),
        "bytes": report["bytes"],
        "max_bytes": 20 * 2**30,
    }
    assert newer["used"] > older["used"]
    assert newer == {
        "identity": NEWER,
        "model": "new/model",
        "scope": "me",
        "records": 2,
        "tokens": 6,
        "bytes": newer["bytes"],
        "used": newer["used"],
    }
    store = opened(root, identity=NEWER)
    assert newer["bytes"] == sum(record.nbytes for record, _ in store.records())
    store.close()


@pytest.mark.parametrize("command", [["list"], ["verify"], ["gc"], ["clear", "--yes"]])
def test_nothing_there(light: Command, tmp_path: Path, command: list[str]) -> None:
    folder = tmp_path / "nowhere"
    ended = light("cache", *command, "--dir", str(folder))
    assert (ended.code, ended.err) == (0, "")
    assert not folder.exists()


def test_the_folder_given_wins(light: Command, root: Path, tmp_path: Path) -> None:
    assert light("cache", "list", "--dir", str(tmp_path / "other")).out.startswith(f"{tmp_path / 'other'}: 0.0 MB of")


def test_verify_finds_all_sound(light: Command, root: Path) -> None:
    ended = light("cache", "verify")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "3 records, 0.0 MB: all as they were written\n"


def test_verify_drops_what_is_damaged(light: Command, root: Path) -> None:
    path = spoil(root)
    ended = light("cache", "verify")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"selfdraft: 2 of 3 records in {root} damaged, or behind one that is: deleted\n"
    assert path.name not in files(root)
    assert light("cache", "verify").out.startswith("1 record, ")


def test_verify_counts_what_does_not_even_open(light: Command, root: Path) -> None:
    spoil(root).unlink()
    ended = light("cache", "verify")
    assert ended.code == 1
    assert "2 of 3 records" in ended.err
    assert light("cache", "verify").code == 0


def test_verify_mends_an_index(light: Command, root: Path) -> None:
    (root / "v1" / "index.sqlite").write_bytes(b"no index" * 1000)
    for command in ("list", "verify"):
        ended = light("cache", command)
        assert (ended.code, ended.out) == (1, "")
    assert "the index of" in ended.err
    assert light("cache", "verify").code == 0
    assert files(root) == set()


def test_an_unreadable_index_beside_a_process(light: Command, root: Path, server: DiskStore) -> None:
    (root / "v1" / "index.sqlite").write_bytes(b"no index" * 1000)
    for command in ("list", "verify"):
        ended = light("cache", command)
        assert (ended.code, ended.out) == (1, "")
        assert "selfdraft cache verify" in ended.err


def test_list_and_verify_beside_a_process(light: Command, root: Path, server: DiskStore) -> None:
    assert len(light("cache", "list").out.splitlines()) == 4
    assert light("cache", "verify").code == 0
    assert right_ones(server) == {2, 3}


def test_verify_drops_nothing_beside_a_process(light: Command, root: Path) -> None:
    path = spoil(root)
    store = opened(root, identity=NEWER)
    ended = light("cache", "verify")
    assert ended.code == 1
    assert "2 of 3 records" in ended.err
    assert "left there" in ended.err
    assert path.name in files(root)
    store.close()


def test_what_a_process_evicts_meanwhile_is_not_damaged(
    light: Command, root: Path, server: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = upkeep._damaged

    def evicting(archive: Archive, entries: Iterable[Entry]) -> list[Entry]:
        entry = server.records()[-1][1].entry if len(server.records()) == 2 else None
        if entry and server._archive:
            server._archive.forget(entry)
            server.flush(10)
        return look(archive, entries)

    monkeypatch.setattr(upkeep, "_damaged", evicting)
    assert light("cache", "verify").code == 0
    assert right_ones(server) == {2}


@pytest.mark.parametrize("command", [["gc"], ["clear", "--yes"]])
def test_who_holds_the_folder_is_named(light: Command, root: Path, server: DiskStore, command: list[str]) -> None:
    before = files(root)
    ended = light("cache", *command)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        f"selfdraft: process {os.getpid()} uses {root}; stop it (a server: `selfdraft stop`), and try again\n"
    )
    assert files(root) == before
    assert right_ones(server) == {2, 3}


@pytest.mark.parametrize(("answer", "cleared"), [(b"y\n", True), (b"YES\n", True), (b"n\n", False), (b"", False)])
def test_clear_asks(light: Command, root: Path, answer: bytes, cleared: bool) -> None:
    (root / "mine.txt").write_text("mine")
    ended = light("cache", "clear", stdin=answer)
    assert f"delete all warm prefixes in {root}?" in ended.out
    assert ended.code == (0 if cleared else 1)
    assert (files(root) == set()) == cleared
    assert (root / "mine.txt").exists()
    if not cleared:
        assert "--yes" in ended.err


def test_clear(light: Command, root: Path) -> None:
    (root / "v0").mkdir()
    (root / "v0" / "index.sqlite").write_bytes(b"x" * 100_000)
    ended = light("cache", "clear", "--yes")
    assert (ended.code, ended.err) == (0, "")
    assert float(ended.out.split()[0]) >= 0.1
    assert [path.name for path in root.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("keep", "left"),
    [((), {NEWER: {2, 3}}), (("--keep", "bb"), {OLDER: {1}}), (("--keep", "all"), {NEWER: {2, 3}, OLDER: {1}})],
)
def test_gc_drops_other_models(light: Command, root: Path, keep: tuple[str, ...], left: dict[str, set[int]]) -> None:
    ended = light("cache", "gc", *keep)
    assert (ended.code, ended.err) == (0, "")
    for identity in (NEWER, OLDER):
        store = opened(root, identity=identity)
        assert right_ones(store) == left.get(identity, set())
        store.close()


def test_gc_knows_no_such_model(light: Command, root: Path) -> None:
    ended = light("cache", "gc", "--keep", "gemma")
    assert ended.code == 1
    assert "'gemma'" in ended.err
    assert "selfdraft cache list" in ended.err
    assert light("cache", "verify").out.startswith("3 records")


def test_gc_clears_away_leftovers(light: Command, root: Path) -> None:
    sound = files(root)
    (root / "v1" / "blobs" / "00").mkdir(exist_ok=True)
    (root / "v1" / "blobs" / "00" / f"{'00' * 32}.part").write_bytes(bytes(500_000))
    (root / "v0").mkdir()
    (root / "v0" / "index.sqlite").write_bytes(bytes(700_000))
    ended = light("cache", "gc", "--keep", "all")
    assert float(ended.out.split()[0]) >= 1.2
    assert files(root) == sound
    assert not (root / "v0").exists()


def test_gc_shrinks_to_the_limit(light: Command, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(root, identity=NEWER)
    for seed in range(10, 40):
        stored(store, seed, size=5000)
    store.close()
    monkeypatch.setenv("SELFDRAFT_SSD_SESSION_CACHE_MAX_BYTES", str(2**20))
    assert light("cache", "gc").code == 0
    assert json.loads(light("cache", "list", "--json").out)["bytes"] < 2**20
    store = opened(root, identity=NEWER)
    left = right_ones(store)
    assert left == set(range(40 - len(left), 40))
    store.close()


def test_nothing_heavy_is_imported(root: Path) -> None:
    script = (
        "import sys\nfrom selfdraft.cli.app import main\n"
        "for words in ('list', 'verify', 'gc', 'clear --yes'):\n"
        "    assert main(['cache', *words.split()]) == 0\n"
        "print([name for name in ('mlx', 'mlx_lm', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["list", "verify", "clear", "gc"])
def test_help(command: str) -> None:
    text = help_of("cache", command)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    cache = get_command(app).commands["cache"]  # type: ignore[attr-defined]
    for option in cache.commands[command].params:
        assert "Default: " in option.help or option.name == "help", option.name
    assert command in help_of("cache")


def test_a_wrong_word(light: Command) -> None:
    for words in ((), ("sweep",), ("gc", "--keep")):
        ended = light("cache", *words)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith("selfdraft: ")
