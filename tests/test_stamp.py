"""Guards that selfdraft.json is obeyed at load, refused when it is broken, and tells what changed since."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfdraft import CheckpointError, InvalidRequest, SamplingParams, load
from selfdraft.stamp import STAMP, Stamp, changed_files, digests, read_stamp, write_stamp
from tests.cli.conftest import Command
from tests.cli.conftest import light as light
from tests.forge.support import nano_source

FULL = Stamp(
    recipe={"bits": 4, "group_size": 64},
    source="owner/model",
    head={"kept": "4bit"},
    files={"config.json": "0" * 64},
    evidence={"when": "2026-01-01T00:00:00+00:00"},
    verdict="yes",
    depth_limit=2,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return nano_source(tmp_path / "model")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_stamp(tmp_path) is None
    write_stamp(tmp_path, FULL)
    assert read_stamp(tmp_path) == FULL
    assert (tmp_path / STAMP).stat().st_mode & 0o777 == 0o644


def test_depth_is_limited(folder: Path) -> None:
    assert load(str(folder)).max_depth == 8
    write_stamp(folder, FULL)
    llm = load(str(folder))
    assert (llm.max_depth, llm.describe()["max_depth"], llm.notes) == (2, 2, [])
    with pytest.raises(InvalidRequest, match="depth"):
        llm.generate("Hi", SamplingParams(depth=3, max_tokens=4))
    write_stamp(folder, replace(FULL, depth_limit=20))
    assert load(str(folder)).max_depth == 8


def test_drafts_come_from_the_vocabulary_it_names(folder: Path) -> None:
    whole = load(str(folder)).loaded.nbytes
    write_stamp(folder, replace(FULL, recipe={"draft_vocabulary": 1024}))
    assert load(str(folder)).loaded.nbytes > whole


def test_a_no_is_told(folder: Path) -> None:
    write_stamp(folder, replace(FULL, verdict="no", reasons=("it is slow",), depth_limit=None))
    assert load(str(folder)).notes == ["`forge verify` said no: it is slow"]


def lying(**fields: Any) -> str:
    return json.dumps({"schema_version": 1, "recipe": {}, "source": "x", **fields})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[1]", "list, not an object"),
        ("[" * 100_000, "recursion"),
        ("\xff", "codec|Expecting"),
        ('{"schema_version": 2}', "schema_version is 2, not 1"),
        ("{}", "schema_version is None"),
        ('{"schema_version": 1, "source": "x"}', "lacks 'recipe'"),
        (lying(source=3), "source is 3"),
        (lying(depth_limit=True), "depth_limit is True"),
        (lying(depth_limit=-1), "depth_limit is -1"),
        (lying(depth_limit=1.5), "depth_limit is 1.5"),
        (lying(verdict="maybe"), "verdict is 'maybe'"),
        (lying(reasons="slow"), "reasons is 'slow'"),
        (lying(reasons=[1]), r"reasons is \[1\]"),
        (lying(files=[]), r"files is \[\]"),
        (lying(files=None), "files is None"),
        (lying(recipe={"draft_vocabulary": "many"}), "draft_vocabulary is 'many'"),
        (lying(recipe={"draft_vocabulary": -1}), "draft_vocabulary is -1"),
        (lying(more=1), "it has 'more'"),
    ],
)
def test_a_broken_one_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / STAMP).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=said) as found:
        read_stamp(tmp_path)
    assert f"{tmp_path / STAMP}: cannot be read" in str(found.value)
    assert "delete it, and `selfdraft forge verify` writes it anew" in str(found.value)
    assert "\n" not in str(found.value)


def test_a_broken_one_is_refused_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / STAMP).write_text("{}")
    monkeypatch.setattr("selfdraft.opening.build_model", None)
    with pytest.raises(CheckpointError, match="schema_version"):
        load(str(folder))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "config.json").write_text("{}"), ["config.json"]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer.json"]),
        (lambda folder: (folder / "mtp.safetensors").write_bytes(b"x"), ["mtp.safetensors"]),
        (lambda folder: (folder / "README.md").write_text("card"), []),
        (lambda folder: write_stamp(folder, Stamp({}, "y")), []),
    ],
)
def test_changed_files_are_named(folder: Path, change: Callable[[Path], object], named: list[str]) -> None:
    stamp = replace(FULL, files=digests(folder))
    assert changed_files(digests(folder), stamp) == []
    change(folder)
    assert changed_files(digests(folder), stamp) == named


def test_nothing_changed_of_what_was_never_verified(folder: Path) -> None:
    assert changed_files(digests(folder), replace(FULL, files={})) == []


def test_inspect_shows_it(light: Command, folder: Path) -> None:
    report = json.loads(light("inspect", str(folder), "--json").out)
    assert (report["stamp"], report["max_depth"]) == (None, 8)
    assert "Qwen" in report["verified"] or "transformers" in report["verified"]
    write_stamp(folder, FULL)
    report = json.loads(light("inspect", str(folder), "--json").out)
    assert report["stamp"]["depth_limit"] == report["max_depth"] == 2
    assert report["runs"] == "self-speculative decoding, depth auto (up to 2)"
    shown = light("inspect", str(folder)).out
    assert "4 bits, group 64 of owner/model, head 4bit" in shown
    assert "yes, 2026-01-01T00:00:00+00:00" in shown


def test_inspect_tells_a_no_and_a_broken_one(light: Command, folder: Path) -> None:
    write_stamp(folder, replace(FULL, verdict="no", reasons=("it is slow",)))
    assert "`forge verify` said no: it is slow" in light("inspect", str(folder)).out
    (folder / STAMP).write_text("{}")
    ended = light("inspect", str(folder))
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.count("\n") == 1
    assert "schema_version" in ended.err
