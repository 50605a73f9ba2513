"""Guards `selfdraft pull`: what is fetched is what the Hub lists, whole and verified, or nobody takes it for a model.

The Hub is one on this machine (tests/support/hub.py) that can break off, lie and change between two requests.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from selfdraft.cli.found_models import find_models
from selfdraft.errors import CheckpointError
from selfdraft.hub.cache import cache_folder, repository_folder
from selfdraft.hub.pins import find_pin, pins_folder
from selfdraft.models.checkpoint import classify
from selfdraft.settings import load_settings
from selfdraft.source import find_model
from tests.reference.families import FAMILIES
from tests.server.conftest import within
from tests.support.checkpoints import add_text_side, save, tensors_of
from tests.support.forge import write_family
from tests.support.hub import FakeHub, commit_of, digest_of, files_of
from tests.support.nano import nano_model

from ..conftest import COMMAND, Command
from .conftest import ID, SHARD, Files, is_a_model, there

# What comes


def test_a_model_is_fetched_verified_and_pinned(hub: FakeHub, files: Files, light: Command) -> None:
    ended = light("pull", ID)
    commit = commit_of(files)
    folder = cache_folder() / "models--owner--nano/snapshots" / commit
    assert ended.code == 0
    assert f"owner/nano is at commit {commit}: {len(files)} files" in ended.err
    assert "100 %" in ended.err
    assert f"pinned to {commit}" in ended.out
    assert str(folder) in ended.out
    assert "MTP head       usable\ndepth limit    8\n" in ended.out
    assert "memory         fits: needs 513 MB of" in ended.out
    assert files_of(folder) == files
    assert (cache_folder() / "models--owner--nano/refs/main").read_text() == commit
    assert not [name for name in there() if "incomplete" in name]


def test_nothing_but_plain_data_at_the_top_is_fetched(hub: FakeHub, files: Files, light: Command) -> None:
    more = {
        "pytorch_model.bin": b"\x80\x04pickle",
        "weights.pkl": b"\x80\x04pickle",
        "modeling_nano.py": b"import os",
        "original/consolidated.safetensors": b"a copy",
        "README.md": b"text",
    }
    hub.put(ID, files | more)
    assert light("pull", ID).code == 0
    assert files_of(find_model(ID)) == files
    assert not [path for _, path, _ in hub.asked if any(path.endswith(name) for name in more)]


def test_a_pulled_model_is_loaded_without_the_network(hub: FakeHub, files: Files, other: Files, light: Command) -> None:
    hub.put(ID, files, "v1")
    light("pull", ID)
    commit = commit_of(files)
    hub.put(ID, other)
    hub.asked.clear()
    folders = {find_model(name) for name in (ID, f"{ID}@main", f"{ID}@{commit}")}
    assert {folder.name for folder in folders} == {commit}
    assert light("inspect", ID).code == 0
    assert hub.asked == []
    find_model(f"{ID}@v1")  # not what was pulled, so the Hub says what it is
    assert hub.asked


def test_pulling_again_moves_the_pin(hub: FakeHub, files: Files, other: Files, light: Command) -> None:
    light("pull", ID)
    new = hub.put(ID, other)
    assert light("pull", ID).code == 0
    assert files_of(find_model(ID)) == other
    assert find_model(ID).name == new
    hub.put(ID, files, "v1")
    assert light("pull", f"{ID}@v1").code == 0  # back, and to a name
    assert find_model(ID).name == commit_of(files) == find_model(f"{ID}@v1").name


def test_a_pull_that_fails_leaves_the_pin(hub: FakeHub, files: Files, other: Files, light: Command) -> None:
    light("pull", ID)
    hub.put(ID, other)
    hub.served[SHARD] = bytes(len(other[SHARD]))
    assert light("pull", ID).code == 1
    assert files_of(find_model(ID)) == files


def test_a_second_pull_fetches_nothing(hub: FakeHub, files: Files, light: Command) -> None:
    light("pull", ID)
    hub.asked.clear()
    ended = light("pull", ID)
    assert ended.code == 0
    assert "all of it here" in ended.err
    assert not [path for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path]


def test_a_dry_run_writes_nothing(hub: FakeHub, files: Files, light: Command) -> None:
    ended = light("pull", "--dry-run", ID)
    assert ended.code == 0
    assert all(name in ended.out for name in files)
    assert "it fits; nothing is fetched" in ended.err
    report = json.loads(light("pull", "--dry-run", "--json", ID).out)
    assert report["schema_version"] == 1
    assert report["bytes"] == report["missing_bytes"] == sum(map(len, files.values()))
    assert not cache_folder().exists()
    assert not pins_folder().exists()


def test_json_says_what_will_run(hub: FakeHub, files: Files, light: Command) -> None:
    report = json.loads(light("pull", "--json", ID).out)
    assert report["commit"] == commit_of(files)
    assert report["head"] == {"usable": True, "reason": ""}
    assert (report["max_depth"], report["fits_memory"], report["pinned"]) == (8, True, True)
    assert {each["name"]: each["digest"] for each in report["files"]} == {
        name: digest_of(name, content) for name, content in files.items()
    }


def test_a_head_that_is_claimed_and_missing_is_said(hub: FakeHub, tmp_path: Path, light: Command) -> None:
    tensors = {name: each for name, each in tensors_of(nano_model(0)).items() if not name.startswith("mtp.")}
    hub.put(ID, files_of(add_text_side(save(tmp_path / "headless", tensors))))
    ended = light("pull", ID)
    assert ended.code == 0
    assert "config.json claims 1 MTP layer(s), but the weights hold no mtp tensors" in ended.out
    assert "depth limit    0\n" in ended.out
    assert "will run       plain decoding" in ended.out


def test_a_disk_without_links_holds_everything_once(
    hub: FakeHub, files: Files, light: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", True)
    assert light("pull", ID).code == 0
    assert files_of(find_model(ID)) == files
    assert not any(path.is_symlink() for path in find_model(ID).iterdir())
    assert not [name for name in there() if name.startswith("blobs/")]
    hub.asked.clear()
    assert light("pull", ID).code == 0
    assert hub.fetched(SHARD) == []


def test_a_token_stays_with_the_hub(
    hub: FakeHub, files: Files, light: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents come from another host, which must not learn it."""
    hub.elsewhere = True
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert light("pull", ID).code == 0
    assert files_of(find_model(ID)) == files
    tokens = {path: token for path, token in hub.tokens.items() if SHARD in path}
    commit = commit_of(files)
    assert tokens == {
        f"/{ID}/resolve/{commit}/{SHARD}": "Bearer hf_secret",
        f"/elsewhere/{ID}/{commit}/{SHARD}": None,
    }


# What breaks off


def test_a_broken_connection_is_taken_up_again(hub: FakeHub, files: Files, light: Command) -> None:
    hub.cut[SHARD] = [1000, 500]
    assert light("pull", ID).code == 0
    assert hub.fetched(SHARD) == ["bytes=0-", "bytes=1000-", "bytes=1500-"]
    assert files_of(find_model(ID)) == files


def test_a_server_that_is_busy_for_a_moment_is_asked_again(hub: FakeHub, files: Files, light: Command) -> None:
    hub.busy[SHARD] = [503, 429, 500]
    assert light("pull", ID).code == 0
    assert len(hub.fetched(SHARD)) == 4
    assert files_of(find_model(ID)) == files


def break_off(hub: FakeHub, light: Command) -> None:
    """A pull of which a shard is there up to byte 1,000."""
    hub.cut[SHARD] = [1000] + [0] * 10
    ended = light("pull", ID)
    assert ended.code == 1
    assert f"{SHARD} broke off at byte 1,000 of " in ended.err
    assert f"`selfdraft pull {ID}` goes on from there" in ended.err
    hub.cut.clear()
    hub.asked.clear()


def test_a_pull_goes_on_where_one_ended(hub: FakeHub, files: Files, light: Command) -> None:
    break_off(hub, light)
    assert not is_a_model()
    assert find_pin(ID) is None
    assert light("pull", ID).code == 0
    assert hub.fetched(SHARD) == ["bytes=1000-"]
    assert files_of(find_model(ID)) == files


def test_a_file_that_changed_meanwhile_is_not_gone_on_with(hub: FakeHub, other: Files, light: Command) -> None:
    break_off(hub, light)
    hub.put(ID, other)
    assert light("pull", ID).code == 0
    assert hub.fetched(SHARD) == ["bytes=0-"]
    assert files_of(find_model(ID)) == other
    assert not [name for name in there() if "incomplete" in name]  # nor is the rest of the old one kept


def test_what_was_put_together_is_verified_as_a_whole(hub: FakeHub, files: Files, other: Files, light: Command) -> None:
    """A server that sends another file's end under the same commit."""
    break_off(hub, light)
    hub.served[SHARD] = other[SHARD]
    ended = light("pull", ID)
    assert ended.code == 1
    assert f"{SHARD} that came has not the size and hash that the Hub lists, and is removed" in ended.err
    assert not [name for name in there() if digest_of(SHARD, files[SHARD]) in name]
    assert not is_a_model()
    hub.served.clear()
    assert light("pull", ID).code == 0
    assert files_of(find_model(ID)) == files


def test_a_server_that_sends_all_of_it_again(hub: FakeHub, files: Files, light: Command) -> None:
    break_off(hub, light)
    hub.ignores_ranges = True
    assert light("pull", ID).code == 0
    assert files_of(find_model(ID)) == files


def test_files_of_other_programs_are_left(hub: FakeHub, light: Command) -> None:
    theirs = repository_folder(ID) / "blobs" / f"{'a' * 64}.1234abcd.incomplete"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"half")
    assert light("pull", ID).code == 0
    assert theirs.read_bytes() == b"half"


def test_two_do_not_fetch_one_file(hub: FakeHub, files: Files, light: Command) -> None:
    partial = repository_folder(ID) / "blobs" / f"{digest_of(SHARD, files[SHARD])}.incomplete"
    partial.parent.mkdir(parents=True)
    with partial.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ended = light("pull", ID)
    assert ended.code == 1
    assert f"another process fetches {SHARD}; wait for it" in ended.err
    assert light("pull", ID).code == 0


def test_ctrl_c_says_how_to_go_on(hub: FakeHub, files: Files, environment: dict[str, str]) -> None:
    hub.hold = threading.Event()
    root = str(Path(__file__).parents[2])
    environment |= {name: os.environ[name] for name in ("HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "XDG_DATA_HOME")}
    process = subprocess.Popen([*COMMAND, "pull", ID], env=environment, stderr=subprocess.PIPE, text=True, cwd=root)
    try:
        assert within(60, lambda: bool(hub.fetched("tokenizer.json")))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    finally:
        hub.hold.set()
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert f"stopped; what was fetched stays, and `selfdraft pull {ID}` goes on from there" in said
    assert "Traceback" not in said
    assert not is_a_model()


# What is not as listed


@pytest.mark.parametrize("kind", ["others", "shorter", "longer", "empty"])
@pytest.mark.parametrize("name", [SHARD, "tokenizer.json"])
def test_another_content_than_listed_is_removed_and_named(
    hub: FakeHub, files: Files, light: Command, kind: str, name: str
) -> None:
    content = files[name]
    hub.served[name] = {
        "others": content[:-1] + b"\0",
        "shorter": content[:-100],
        "longer": content + b"more",
        "empty": b"",
    }[kind]
    ended = light("pull", ID)
    assert ended.code == 1
    assert ended.out == ""
    assert f"{name} that came has not the size and hash that the Hub lists, and is removed" in ended.err
    assert not [each for each in there() if each.endswith((digest_of(name, content), f"/{name}"))]
    assert not is_a_model()
    assert find_pin(ID) is None
    hub.served.clear()
    light("pull", ID)
    assert files_of(find_model(ID)) == files


def test_a_file_damaged_on_this_disk_is_fetched_again(hub: FakeHub, files: Files, light: Command) -> None:
    light("pull", ID)
    blob = (find_model(ID) / SHARD).resolve()
    blob.chmod(0o600)
    blob.write_bytes(bytes(len(files[SHARD])))
    ended = light("pull", ID)
    assert ended.code == 0
    assert f"{SHARD} is not what the Hub lists: removed, and fetched again" in ended.err
    assert files_of(find_model(ID)) == files


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json",
        "/etc/evil.json",
        "a/../../evil.safetensors",
        "a\\..\\evil.json",
        "C:evil.json",
        "a//b.json",
        "x\n.json",
    ],
)
def test_names_that_lead_out_of_the_folder(hub: FakeHub, files: Files, light: Command, name: str) -> None:
    hub.put(ID, files | {name: b"{}"})
    ended = light("pull", ID)
    assert ended.code == 1
    assert f"{name!r} leads out of a model folder; nothing is fetched from there" in ended.err
    assert not cache_folder().exists()


@pytest.mark.parametrize(
    "lie",
    [
        {"lfs": {"sha256": "../../../evil", "size": 10, "pointerSize": 1}},
        {"lfs": None, "blobId": "/tmp/evil"},
        {"lfs": {"sha256": "a" * 64, "size": -1, "pointerSize": 1}},
        {"lfs": None, "size": None},
        {"lfs": None, "blobId": None},
    ],
)
def test_hashes_and_sizes_that_are_none(hub: FakeHub, light: Command, lie: dict[str, Any]) -> None:
    hub.lies[SHARD] = lie
    ended = light("pull", ID)
    assert ended.code == 1
    assert f"the Hub gives {SHARD} the size" in ended.err
    assert not cache_folder().exists()


def test_a_head_that_is_a_checkpoint_of_its_own(hub: FakeHub, tmp_path: Path, light: Command) -> None:
    """It is fetched for the model that it belongs to, and taken for no model itself."""
    assistant = FAMILIES["gemma4"].assistant
    assert assistant is not None
    hub.put(ID, files_of(write_family(assistant, tmp_path / "assistant")))
    ran = light("pull", ID)
    assert ran.code == 0
    assert "this is the head of another model (gemma4_assistant)" in ran.out
    with pytest.raises(CheckpointError, match="load the model itself"):
        classify(find_model(ID))
    assert [each.problem[:32] for each in find_models(load_settings(), places=()) if each.name == ID] == [
        "this is the head of another mode"
    ]
