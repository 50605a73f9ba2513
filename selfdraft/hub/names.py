"""Ids of models on the Hub, as people write them: owner/name, owner/name@revision."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["ModelId", "is_commit", "parse"]

_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ModelId:
    """A model, and what of its history.

    Attributes:
        repository: "owner/name".
        revision: a branch, a tag or a commit; None where none was given, which is the branch "main".
    """

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def parse(name: str) -> ModelId | None:
    """The id that a name spells; None if it spells none.

    Revisions become paths in the cache, so one that leads out of it is none.
    """
    match = _ID.fullmatch(name)
    if match is None:
        return None
    repository, revision = match[1], match[2]
    if ".." in repository or "--" in repository or (revision and not _is_inside(revision)):
        return None
    return ModelId(repository, revision)


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit's full hash, and so stands for the same files for ever."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def _is_inside(revision: str) -> bool:
    return all(part not in ("", ".", "..") for part in revision.split("/"))
