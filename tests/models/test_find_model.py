"""Guards how the name of a model becomes a folder: bundled, local, or from the Hub's cache; else a clear refusal.

Names are never looked up on the network here: the Hub's client is offline, in a process of its own, because it reads
its environment at import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from selfdraft import ModelNotFound
from selfdraft.models.checkpoint import classify
from selfdraft.source import REFERENCE, find_model
from tests.support.checkpoints import save, tensors_of
from tests.support.nano import nano_model

ROOT = Path(__file__).parents[2]
FIRST, SECOND = "a" * 40, "b" * 40  # commit hashes
LOOKUP = """
import sys
from selfdraft import ModelNotFound
from selfdraft.source import find_model
for name in sys.argv[1:]:
    try:
        print(find_model(name))
    except ModelNotFound as error:
        print("REFUSED", error)
"""


def test_reference_is_the_bundled_checkpoint() -> None:
    checkpoint = classify(find_model(REFERENCE))
    assert checkpoint.model_type == "qwen3_5_text"
    assert (checkpoint.head.source, checkpoint.head.tensors) == ("embedded", 15)


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert find_model(str(tmp_path / "models" / "mine")) == tmp_path / "models" / "mine"
    # A folder that looks like a Hub id wins over the Hub; "~" is the home folder.
    monkeypatch.chdir(tmp_path)
    assert find_model("models/mine").samefile(tmp_path / "models" / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/models/mine") == tmp_path / "models" / "mine"


def test_a_file_is_refused_with_what_to_give(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelNotFound, match="is a file; give the folder"):
        find_model(str(file))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nonsense",
        "/no/such/folder",
        "./missing",
        "a/b/c",
        "owner/",
        "/name",
        "owner/na me",
        "http://host/owner/name",
        "owner/name@../../../x",
        "owner/name@/etc",
        "owner/name@a//b",
        "owner/na--me",
        "owner/..",
    ],
)
def test_names_that_can_mean_nothing_never_reach_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*given: object, **options: object) -> str:
        raise AssertionError(f"the Hub was asked for {given}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", reached)
    with pytest.raises(ModelNotFound, match="'reference', an existing folder, or a Hugging Face id"):
        find_model(name)


def test_the_hub_is_asked_for_what_is_read_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None, list[str], bool]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((repository, revision, allow_patterns, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("selfdraft.source._listed", lambda model: [])  # a Hub that lists nothing judges nothing
    assert find_model("owner/some.model-1_b") == tmp_path
    assert find_model("owner/name@refs/pr/7") == tmp_path
    patterns = ["*.json", "*.jinja", "*.safetensors"]
    assert asked == [("owner/some.model-1_b", None, patterns, False), ("owner/name", "refs/pr/7", patterns, False)]
    find_model("owner/name", fetch=False)
    assert asked[-1][-1] is True


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub cache with two revisions of owner/nano, as the Hub's client lays it out."""
    root = tmp_path_factory.mktemp("hub")
    repository = root / "models--owner--nano"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(FIRST)
    for revision, seed in ((FIRST, 0), (SECOND, 1)):
        save(repository / "snapshots" / revision, tensors_of(nano_model(seed)))
    return root


def look_up(cache: Path, *names: str) -> list[str]:
    """What `find_model` prints for each name, offline, with this cache."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache)}
    command = [sys.executable, "-c", LOOKUP, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_hub_ids_offline(cache: Path) -> None:
    main, pinned, absent, no_revision = look_up(
        cache, "owner/nano", f"owner/nano@{SECOND}", "owner/absent", "owner/nano@v2"
    )
    snapshots = cache / "models--owner--nano" / "snapshots"
    assert (Path(main), Path(pinned)) == (snapshots / FIRST, snapshots / SECOND)
    assert classify(Path(main)).head.reason == ""
    for line, name in ((absent, "owner/absent"), (no_revision, "owner/nano@v2")):
        assert line.startswith(f"REFUSED '{name}' is no local folder and could not be fetched from")
        assert line.endswith("check the name, the network, and for a gated model `hf auth login`")
