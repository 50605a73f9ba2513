"""Where the Hugging Face cache keeps a model, and how one leaves it. Other programs share this folder.

Its layout, as the Hub's client documents it: `models--OWNER--NAME/` holds `blobs/HASH` (contents),
`snapshots/COMMIT/FILE` (links to them) and `refs/REVISION` (the commit a branch stood for when it was fetched).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SelfdraftError
from .names import ModelId

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

__all__ = [
    "Removal",
    "blobs_folder",
    "cache_folder",
    "cached_models",
    "id_of",
    "point",
    "removal",
    "repository_folder",
    "snapshot_folder",
]


def cache_folder() -> Path:
    """The cache: $HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def repository_folder(repository: str) -> Path:
    """Where everything of a repository lies."""
    return cache_folder() / f"models--{repository.replace('/', '--')}"


def blobs_folder(repository: str) -> Path:
    """Where contents lie, under their hash; those that are not whole yet end in `.incomplete`."""
    return repository_folder(repository) / "blobs"


def snapshot_folder(repository: str, commit: str) -> Path:
    """The model folder of a commit."""
    return repository_folder(repository) / "snapshots" / commit


def id_of(path: Path) -> ModelId | None:
    """The model that a path in the cache belongs to: one commit inside its snapshots, else all. None elsewhere."""
    try:
        parts = path.absolute().resolve().relative_to(cache_folder().resolve()).parts
    except ValueError:
        return None
    if not parts or not parts[0].startswith("models--"):
        return None
    repository = parts[0].removeprefix("models--").replace("--", "/")
    return ModelId(repository, parts[2] if len(parts) > 2 and parts[1] == "snapshots" else None)


def cached_models() -> Iterator[CachedRepoInfo]:
    """The models in the cache, by name. None where there is no cache, or it cannot be read."""
    found = _scan()
    if found is not None:
        models = [each for each in found.repos if each.repo_type == "model" and each.revisions]
        yield from sorted(models, key=lambda each: each.repo_id)


def point(repository: str, revision: str, commit: str) -> None:
    """Note what a branch or a tag stands for, as the Hub's client does, for programs that go by names.

    Raises:
        OSError: it cannot be written.
    """
    path = repository_folder(repository) / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")  # with everybody's permissions: the cache may be shared
    fresh.write_text(commit, encoding="utf-8")
    os.replace(fresh, path)


@dataclass(frozen=True)
class Removal:
    """What would leave the cache.

    Attributes:
        repository: "owner/name".
        commits: of the revisions that go; none where a download never got as far.
        bytes: that become free; contents which other revisions need stay.
    """

    repository: str
    commits: tuple[str, ...]
    bytes: int

    def execute(self) -> None:
        """Delete it.

        Raises:
            SelfdraftError: something is still there.
        """
        found = _scan(self.repository)
        if found is not None and self.commits:
            found.delete_revisions(*self.commits).execute()
        else:
            shutil.rmtree(repository_folder(self.repository), ignore_errors=True)
        places = [snapshot_folder(self.repository, commit) for commit in self.commits]
        for place in places or [repository_folder(self.repository)]:
            if place.exists():
                raise SelfdraftError(f"{place} cannot be deleted; look at its permissions, and try again")


def removal(repository: str, revision: str | None = None) -> Removal | None:
    """What there is to remove of a repository.

    Args:
        revision: of which branch, tag or commit alone; None for all, downloads that were interrupted among it.

    Returns:
        None if the cache holds nothing of it.
    """
    found, folder = _scan(repository), repository_folder(repository)
    revisions = {each for repo in found.repos for each in repo.revisions} if found else set()
    commits = {each.commit_hash for each in revisions if revision in (None, each.commit_hash, *each.refs)}
    if found is None or not folder.is_dir() or not (commits or revision is None):
        return None
    if len(commits) == len(revisions):  # with it goes the folder
        files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        return Removal(repository, tuple(sorted(commits)), sum(path.stat().st_size for path in files))
    return Removal(repository, tuple(sorted(commits)), found.delete_revisions(*commits).expected_freed_size)


def _scan(repository: str | None = None) -> HFCacheInfo | None:
    """What the cache holds, of one repository or of all: copies of a repository have the same commits, and the Hub's
    client deletes by commit alone."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir(cache_folder())
    except (CacheNotFound, OSError, ValueError):
        return None
    if repository is None:
        return found
    name = repository_folder(repository).name
    return replace(found, repos=frozenset(repo for repo in found.repos if repo.repo_path.name == name))
