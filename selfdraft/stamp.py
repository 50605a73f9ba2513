"""`selfdraft.json`: what a package was made by, and what was measured of it. Knows files and digests; loads no model.

{"schema_version": 1, "recipe": {...}, "source": "...", "head": {...}, "files": {name: sha256}, "evidence": {...},
 "verdict": "yes" or "no", "reasons": [...], "depth_limit": 3}. Before `forge verify` there is no verdict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .files import write_atomically

__all__ = ["STAMP", "Stamp", "changed_files", "digests", "read_stamp", "write_stamp"]

STAMP = "selfdraft.json"
SCHEMA_VERSION = 1

_PIECE = 2**22
_KINDS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True)
class Stamp:
    """The content of a package's selfdraft.json.

    Attributes:
        recipe, source: how and from what it was made.
        head: what became of the head, with acceptance by depth for each way to store it.
        files: digests of all others, once it is verified.
        evidence: what was measured, where, and with which versions.
        verdict: "yes" if it is worth running with drafts here, "no" with `reasons`; "" before it is verified.
        depth_limit: deepest draft that paid where it was verified; None for what the head allows.
    """

    recipe: dict[str, Any]
    source: str
    head: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    depth_limit: int | None = None

    @property
    def draft_vocabulary(self) -> int:
        """See `Settings.draft_vocabulary`; that of the recipe."""
        return int(self.recipe.get("draft_vocabulary", 0))

    def limited(self, max_depth: int) -> int:
        """Deepest draft, of a head that allows `max_depth`."""
        return max_depth if self.depth_limit is None else min(max_depth, self.depth_limit)

    @property
    def notes(self) -> list[str]:
        """Lines a user should read."""
        return [f"`forge verify` said no: {'; '.join(self.reasons)}"] if self.verdict == "no" else []


def read_stamp(folder: Path) -> Stamp | None:
    """The stamp of a model folder, if it has one.

    Raises:
        CheckpointError: there is one that cannot be read.
    """
    path = folder / STAMP
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("schema_version") != SCHEMA_VERSION:
            raise ValueError("it is of another version of Selfdraft")
        stamp = Stamp(**{**content, "reasons": tuple(content.get("reasons", ()))})
        _check(stamp)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); run `selfdraft forge verify` again, or delete it"
        ) from error
    return stamp


def _check(stamp: Stamp) -> None:
    kinds: Mapping[str, type] = {
        "recipe": dict,
        "source": str,
        "head": dict,
        "files": dict,
        "evidence": dict,
        "verdict": str,
    }
    for name, kind in kinds.items():
        if not isinstance(getattr(stamp, name), kind):
            raise ValueError(f"{name} is {getattr(stamp, name)!r}")
    if not all(isinstance(reason, str) for reason in stamp.reasons):
        raise ValueError(f"reasons are {stamp.reasons!r}")
    size = stamp.recipe.get("draft_vocabulary", 0)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f"draft_vocabulary is {size!r}")
    limit = stamp.depth_limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise ValueError(f"depth_limit is {limit!r}")


def write_stamp(folder: Path, stamp: Stamp) -> None:
    """Write it.

    Raises:
        OSError: it cannot be written; then nothing has changed.
    """
    write_atomically(folder / STAMP, json.dumps({"schema_version": SCHEMA_VERSION, **asdict(stamp)}, indent=2) + "\n")
    (folder / STAMP).chmod(0o644)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of a package's files, but the stamp, by name.

    Raises:
        OSError: one cannot be read.
    """
    paths = sorted({path for kind in _KINDS for path in folder.glob(kind) if path.is_file() and path.name != STAMP})
    found = {}
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        found[path.name] = digest.hexdigest()
    return found


def changed_files(folder: Path, stamp: Stamp) -> list[str]:
    """Names of files that are not what was verified: changed, missing or new."""
    now = digests(folder)
    return sorted(name for name in now.keys() | stamp.files.keys() if now.get(name) != stamp.files.get(name))
