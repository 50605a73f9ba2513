"""A Hub on this machine with a model on it, for the tests of `selfdraft pull`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from selfdraft.cli.found_models import find_models
from selfdraft.hub import transfer
from selfdraft.hub.cache import repository_folder
from selfdraft.settings import load_settings
from tests.support.checkpoints import add_text_side, save, tensors_of
from tests.support.hub import FakeHub, fake_hub, files_of, use
from tests.support.nano import nano_model

ID = "owner/nano"
SHARD = "model-00001-of-00002.safetensors"
Files = dict[str, bytes]


def model_files(folder: Path, seed: int) -> Files:
    return files_of(add_text_side(save(folder, tensors_of(nano_model(seed)), shards=2)))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return model_files(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The same model after more training: same names, same sizes."""
    return model_files(tmp_path_factory.mktemp("other"), 1)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Files) -> Iterator[FakeHub]:
    monkeypatch.setattr(transfer, "_PAUSE", 0.0)
    with fake_hub() as hub:
        use(hub.url, tmp_path, monkeypatch)
        hub.put(ID, files)
        yield hub


def there() -> list[str]:
    """Everything of the repository in the cache, folders left out."""
    root = repository_folder(ID)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def is_a_model() -> bool:
    """Whether anybody would take what is in the cache for a model."""
    return any(each.name.startswith(ID) for each in find_models(load_settings(), places=()))
