"""Where models may lie outside the Hugging Face cache: folders of the user's, disks that are plugged in.

Looked at shallowly, each place on a thread of its own and for a short time, so that a disk that sleeps or is huge, or a
server that went away, holds nobody up.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from ..settings import StoredSettings

__all__ = ["PLACES", "ModelSettings", "Place", "all_places", "look"]

PLACES = (".", "~/models", "~/.lmstudio/models")

_DEPTH = {"folder": 2, "disk": 3}  # levels below a place: OWNER/NAME, and on a disk a folder for them
_SECONDS = 2.0  # for each place


class ModelSettings(StoredSettings):
    """Where models are looked for; the table [models] of settings.toml.

    Attributes:
        model_folders: folders that are, or hold, or whose folders hold, a model. In the environment they are written as
            in PATH, with ":" between them.
    """

    tables: ClassVar[tuple[str, ...]] = ("models",)

    model_folders: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(lambda given: _folders(given))] = ()


@dataclass(frozen=True)
class Place:
    """Somewhere to look.

    Attributes:
        folder: where.
        kind: what it is.
    """

    folder: Path
    kind: Literal["folder", "disk"] = "folder"


@dataclass
class _Look:
    place: Place
    found: list[Path] = field(default_factory=list)
    over: bool = False


def all_places(settings: ModelSettings) -> list[Place]:
    """The folders that people keep models in, the user's own, and every disk that is mounted beside the system's."""
    folders = [each.expanduser() for each in (*map(Path, PLACES), *settings.model_folders)]
    return [Place(folder) for folder in folders] + [Place(disk, "disk") for disk in _disks()]


def look(places: Sequence[Place], silent: Callable[[Path], None]) -> list[tuple[Place, Path]]:
    """The folders in these places that hold a configuration and safetensors, in their order.

    Args:
        silent: called with each place that did not answer in time.
    """
    looks = [_Look(place) for place in places]
    deadline = time.monotonic() + _SECONDS
    threads = [threading.Thread(target=_search, args=(each, deadline), daemon=True) for each in looks]
    for thread in threads:
        thread.start()
    for thread, each in zip(threads, looks, strict=True):
        thread.join(max(deadline - time.monotonic(), 0.0))
        if not each.over:
            silent(each.place.folder)
    return [(each.place, folder) for each in looks for folder in list(each.found)]


def _search(look: _Look, deadline: float) -> None:
    if os.path.realpath(look.place.folder) != "/":  # as macOS shows the system's disk among the others
        for folder in _models_below(look.place.folder, _DEPTH[look.place.kind], deadline):
            look.found.append(folder)
    look.over = time.monotonic() < deadline


def _models_below(folder: Path, depth: int, deadline: float) -> Iterator[Path]:
    if time.monotonic() > deadline:
        return
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError:
        return
    names = [entry.name for entry in entries]
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        yield folder
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            path = Path(entry.path)
            if entry.name.startswith("models--"):  # a Hugging Face cache lies here
                yield from _models_below(path / "snapshots", 1, deadline)
            elif depth:
                yield from _models_below(path, depth - 1, deadline)


def _disks() -> list[Path]:
    """Where systems mount disks that are plugged in. Only their names are read: a disk itself may not answer."""
    roots = [Path("/Volumes")]
    if sys.platform != "darwin":
        roots = [Path("/mnt")]
        with contextlib.suppress(OSError, KeyError):  # a user without a name has no folder for disks
            roots += [Path("/media") / getpass.getuser(), Path("/run/media") / getpass.getuser()]
    found = []
    for root in roots:
        with contextlib.suppress(OSError):
            found += sorted(root / name for name in os.listdir(root) if not name.startswith("."))
    return found


def _folders(given: object) -> object:
    """A list as it is; text as PATH is written."""
    return [part for part in given.split(os.pathsep) if part] if isinstance(given, str) else given
