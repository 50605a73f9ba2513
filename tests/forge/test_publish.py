"""Guards that only what was verified is shown to others, with all that was measured and nothing of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from selfdraft import SelfdraftError
from selfdraft.forge import Recipe, build, exactness, head, publish, verify
from selfdraft.forge.publish import card
from selfdraft.forge.wiring import AS_BUILT
from selfdraft.stamp import STAMP, Stamp, read_stamp, write_stamp
from tests.support.hub import use
from tests.support.upload_hub import UploadHub, upload_hub

from .support import few_texts, nano_source

ID = "owner/name"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A nano package, taken for one that drafts well and verified so."""
    folder = tmp_path_factory.mktemp("publish")
    with pytest.MonkeyPatch.context() as patch:
        few_texts(patch)
        patch.setattr(exactness, "TOKENS", 4)
        patch.setattr(exactness, "HELD_OUT", exactness.HELD_OUT[:1])
        patch.setitem(verify.__globals__, "wirings", lambda *given: {AS_BUILT: 0.6, "the other way": 0.1})
        made = build(nano_source(folder / "source"), folder / "package", Recipe.named("4bit")).folder
        (made / "LICENSE").write_text("MIT")
        assert verify(made, speed=False).verdict == "yes"
    assert head.TOKENS > 12
    return made


@pytest.fixture
def stamp(package: Path) -> Iterator[Stamp]:
    """Of the package; put back afterwards."""
    found = read_stamp(package)
    assert found is not None
    yield found
    write_stamp(package, found)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    with upload_hub() as found:
        use(found.url, tmp_path / "home", monkeypatch)
        yield found


def test_uploads_what_was_verified(package: Path, hub: UploadHub) -> None:
    (package / "notes.txt~").write_text("mine")
    (package / "private").mkdir(exist_ok=True)
    (package / "private" / "key.json").write_text("{}")
    done = publish(package, ID)
    assert hub.made[ID]["visibility"] == "private"
    found = read_stamp(package)
    assert found is not None
    assert hub.files[ID].keys() == {*found.files, STAMP, "README.md", "LICENSE"} == set(done.files)
    assert all(content == (package / name).read_bytes() for name, content in hub.files[ID].items())
    assert done.address == f"{hub.url}/{ID}"
    assert done.nbytes == sum(len(content) for content in hub.files[ID].values())


def test_for_all_to_see_if_asked(package: Path, hub: UploadHub) -> None:
    publish(package, ID, private=False)
    assert hub.made[ID]["visibility"] == "public"


def test_a_dry_run_sends_nothing(package: Path, hub: UploadHub) -> None:
    done = publish(package, ID, dry_run=True)
    assert (hub.asked, done.address) == ([], "")
    assert "README.md" in done.files
    assert (package / "README.md").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stamp: replace(stamp, verdict=""), "is not verified: run `selfdraft forge verify"),
        (lambda stamp: replace(stamp, verdict="no", reasons=("slow", "wrong")), "not worth publishing: slow; wrong"),
        (lambda stamp: replace(stamp, recipe={}), "was not made by `selfdraft forge build`"),
        (lambda stamp: replace(stamp, files={**stamp.files, "config.json": "0"}), "config.json changed since"),
        (lambda stamp: replace(stamp, evidence={}), "holds no evidence that could be shown"),
        (lambda stamp: replace(stamp, head={"kept": "4bit"}), "holds no evidence that could be shown"),
    ],
)
def test_refuses(package: Path, hub: UploadHub, stamp: Stamp, change: Callable[[Stamp], Stamp], said: str) -> None:
    write_stamp(package, change(stamp))
    with pytest.raises(SelfdraftError, match=said):
        publish(package, ID)
    assert hub.asked == []


def test_refuses_what_has_no_stamp(tmp_path: Path, hub: UploadHub) -> None:
    with pytest.raises(SelfdraftError, match="was not made by"):
        publish(nano_source(tmp_path / "model"), ID)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "hf auth login"),
        (403, "may not write there"),
        (404, "no such owner"),
        (500, "answered 500; run this again"),
    ],
)
def test_the_hub_refuses(package: Path, hub: UploadHub, status: int, said: str) -> None:
    hub.status = status
    with pytest.raises(SelfdraftError, match=said) as found:
        publish(package, ID)
    assert str(found.value).startswith(f"{ID} was not published: ")
    assert "\n" not in str(found.value)


def test_no_network(package: Path, hub: UploadHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:9", tmp_path / "home", monkeypatch)
    with pytest.raises(SelfdraftError, match="cannot be reached") as found:
        publish(package, ID)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["a/b/c", "owner/na me", "owner/..", "", "name"])
def test_ids_that_are_none(package: Path, hub: UploadHub, name: str) -> None:
    with pytest.raises(SelfdraftError, match=r"give OWNER/NAME"):
        publish(package, name)
    assert hub.files == {}


def test_the_card(package: Path, stamp: Stamp) -> None:
    text = card(ID, stamp)
    _, metadata, body = text.split("---\n", 2)
    assert "library_name: selfdraft" in metadata
    assert "base_model" not in metadata  # a folder's name is none
    assert "base_model: a/b\n" in card(ID, replace(stamp, source="a/b"))
    shown = MarkdownIt("commonmark").enable("table").render(body)
    assert shown.count("<table>") == 1
    assert shown.count("<tr>") == 4  # a row for each way to store the head
    assert shown.count("<h2>") == 3
    for way in ("dense", "4bit-naive", "4bit"):
        assert f"<td>{way}</td>" in shown
    assert f"selfdraft run --model {ID}" in shown
    assert "speed: not measured" in shown
    assert "60% as built" in shown


def test_nothing_of_this_machine(package: Path, stamp: Stamp) -> None:
    for text in (card(ID, stamp), (package / STAMP).read_text()):
        for private in (str(package.parent), str(Path.home()), os.uname().nodename):
            assert private not in text


def test_the_card_tells_speeds(stamp: Stamp) -> None:
    candidates: list[dict[str, Any]] = [
        {"depth": 0, "tokens_per_second": {"median": 20.0}, "ratio": 1.0},
        {"depth": 2, "tokens_per_second": {"median": 31.5}, "ratio": 1.575},
    ]
    evidence = {**stamp.evidence, "speed": {"candidates": candidates}}
    text = card(ID, replace(stamp, evidence=evidence, depth_limit=2))
    assert "- depth 2: 31.5 tokens a second, 1.57 of plain decoding" in text
    assert "- plain decoding: 20.0 tokens a second" in text
    assert "- depth limit: 2" in text
