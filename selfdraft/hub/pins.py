"""Which commit the name of a pulled model stands for, so that loading it needs no network and never changes by itself.

A pin is one small JSON file in the user's data folder. What cannot be read is no pin.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from ..errors import SelfdraftError
from ..files import write_atomically
from .names import ModelId, is_commit

__all__ = ["Pin", "find_pin", "forget_pin", "keep_pin", "pins_folder"]

log = logging.getLogger(__name__)

_SCHEMA = 1


@dataclass(frozen=True)
class Pin:
    """A name and what it stands for.

    Attributes:
        repository: "owner/name".
        revision: what was asked for when it was pulled, such as "main".
        commit: what that was then.
    """

    repository: str
    revision: str
    commit: str

    def covers(self, model: ModelId) -> bool:
        """Whether an id means this pin: the bare name, or the revision that was pulled."""
        return model.repository == self.repository and model.revision in (None, self.revision, self.commit)


def pins_folder() -> Path:
    """Where the pins lie."""
    return platformdirs.user_data_path("selfdraft") / "pins"


def find_pin(repository: str) -> Pin | None:
    """The pin of a repository; None if it was never pulled."""
    path = _path(repository)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        pin = Pin(repository, str(content["revision"]), content["commit"])
        if content["schema_version"] != _SCHEMA or content["repository"] != repository or not is_commit(pin.commit):
            raise ValueError("it belongs to something else")
        return pin
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is no pin of `selfdraft pull` that can be used, and is ignored (%s)", path, error)
        return None


def keep_pin(pin: Pin) -> None:
    """Pin a name, in place of the pin before.

    Raises:
        SelfdraftError: it cannot be written; the one before stays.
    """
    path = _path(pin.repository)
    try:
        write_atomically(path, json.dumps({"schema_version": _SCHEMA, **asdict(pin)}, indent=1) + "\n")
    except OSError as error:
        raise SelfdraftError(f"{path} cannot be written ({error.strerror or error}): nothing is pinned") from error


def forget_pin(repository: str) -> bool:
    """Drop a pin; returns whether there was one.

    Raises:
        OSError: it cannot be deleted.
    """
    path = _path(repository)
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _path(repository: str) -> Path:
    return pins_folder() / f"{repository.replace('/', '--')}.json"
