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
        files: SHA-256 of all others by name, once it is verified.
        evidence: what was measured, where, and with which versions.
        verdict: "yes" if it is worth running with drafts here, "no" with `reasons`; "" before it is verified.
        depth_limit: deepest draft that paid where it was verified, if a deeper one did not; None for what the head
            allows.
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
        size: int = self.recipe.get("draft_vocabulary", 0)
        return size

    def limited(self, max_depth: int) -> int:
        """Deepest draft, of a head that allows `max_depth`."""
        return max_depth if self.depth_limit is None else min(max_depth, self.depth_limit)

    @property
    def notes(self) -> list[str]:
        """Lines a user should read."""
        return [f"`forge verify` said no: {'; '.join(self.reasons)}"] if self.verdict == "no" else []


def read_stamp(folder: Path) -> Stamp | None:
    """The stamp of a model folder, if it has one.

    Whether files are still those that were verified is not asked: that takes reading them all. `forge verify` and
    `forge publish` do; what a stamp limits here is speed, not what is decoded.

    Raises:
        CheckpointError: there is one that cannot be read, or holds what none holds.
    """
    path = folder / STAMP
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds {type(content).__name__}, not an object")
        if (version := content.pop("schema_version", None)) != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {version!r}, not {SCHEMA_VERSION}")
        return _checked(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); delete it, and `selfdraft forge verify` writes it anew"
        ) from error


_FIELDS: Mapping[str, type] = {
    "recipe": dict,
    "source": str,
    "head": dict,
    "files": dict,
    "evidence": dict,
    "verdict": str,
    "reasons": list,
    "depth_limit": int,
}


def _checked(content: dict[str, Any]) -> Stamp:
    """Raises ValueError for what no stamp holds."""
    for name in ("recipe", "source"):
        if name not in content:
            raise ValueError(f"it lacks {name!r}")
    for name, value in content.items():
        kind = _FIELDS.get(name)
        if kind is None:
            raise ValueError(f"it has {name!r}, which no stamp has")
        if (name, value) != ("depth_limit", None) and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(f"{name} is {value!r}")
    reasons = content.get("reasons", [])
    if not all(isinstance(reason, str) for reason in reasons):
        raise ValueError(f"reasons is {reasons!r}")
    if (verdict := content.get("verdict", "")) not in ("", "yes", "no"):
        raise ValueError(f"verdict is {verdict!r}, not 'yes' or 'no'")
    if (limit := content.get("depth_limit")) is not None and limit < 0:
        raise ValueError(f"depth_limit is {limit}")
    few = content["recipe"].get("draft_vocabulary", 0)
    if not isinstance(few, int) or isinstance(few, bool) or few < 0:
        raise ValueError(f"draft_vocabulary is {few!r}")
    return Stamp(**{**content, "reasons": tuple(reasons)})


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


def changed_files(now: Mapping[str, str], stamp: Stamp) -> list[str]:
    """Names of files that are not what was verified: changed, missing or new. None if nothing was.

    Args:
        now: `digests` of the folder.
    """
    if not stamp.files:
        return []
    return sorted(name for name in now.keys() | stamp.files.keys() if now.get(name) != stamp.files.get(name))
