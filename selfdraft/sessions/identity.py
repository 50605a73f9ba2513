"""What a stored state hangs on, as one digest: a state of another identity is never found. Reads files; no arrays."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from ..files import write_atomically

__all__ = ["LAYOUT", "identity"]

log = logging.getLogger(__name__)

LAYOUT = 1  # of a boundary's arrays and their names; raise it when these, or how they are computed, change

_BLOCK = 2**22
_KINDS = ("**/*.safetensors", "*.json", "*.jinja")  # an index may name weights in folders below
_SHA256 = re.compile(r"[0-9a-f]{64}")


def identity(folder: Path, facts: Mapping[str, object], notebook: Path) -> str:
    """The digest of a checkpoint's files and of some facts, as hex.

    Args:
        folder: the checkpoint: weights, configuration, tokenizer, template.
        facts: what else the bits of a state hang on: dtype, quantisation, head, device, versions.
        notebook: a file in which digests are remembered, so that gigabytes are read once.

    Raises:
        OSError: a file of the checkpoint cannot be read.
    """
    known = _read(notebook)
    files = sorted(path for kind in _KINDS for path in folder.glob(kind) if path.is_file())
    digests = {str(path.relative_to(folder)): _digest(path, known) for path in files}
    _write(notebook, known)
    content = {"layout": LAYOUT, "files": digests, **facts}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _digest(path: Path, known: dict[str, str]) -> str:
    """SHA-256 of a file; without reading it where it is known for a file of this path, size, time and number."""
    target = path.resolve()
    if target.parent.name == "blobs" and _SHA256.fullmatch(target.name):  # large files of the Hugging Face cache
        return target.name
    status = target.stat()
    key = f"{target}|{status.st_size}|{status.st_mtime_ns}|{status.st_ino}"
    if key not in known:
        digest = hashlib.sha256()
        with target.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        known[key] = digest.hexdigest()
    return known[key]


def _read(notebook: Path) -> dict[str, str]:
    try:
        content = json.loads(notebook.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = content.items() if isinstance(content, dict) else ()
    return {key: value for key, value in entries if isinstance(value, str) and _SHA256.fullmatch(value)}


def _write(notebook: Path, known: dict[str, str]) -> None:
    """Remember digests; of paths that there are several entries for, the newest."""
    newest = {key.split("|")[0]: key for key in known}
    kept = {key: known[key] for key in newest.values()}
    if kept != _read(notebook):
        try:
            write_atomically(notebook, json.dumps(kept, indent=1))
        except OSError as error:
            log.warning("digests of weights cannot be remembered (%s): they are computed again next time", error)
