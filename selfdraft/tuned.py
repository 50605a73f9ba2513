"""What `selfdraft tune` found, kept for `depth=auto` to begin with. Knows records and what they hang on.

A record is one small JSON file in the user's data folder. It holds for one build of a model on one machine, as it ran:
device, BLAS, dtype, kernels and the version of MLX. What cannot be read, or belongs to something else, is no record.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import platformdirs

from .engine import DepthStart
from .errors import SelfdraftError
from .files import write_atomically

__all__ = ["SCHEMA", "belongs_to", "build_print", "find", "forget", "records_folder", "store"]

log = logging.getLogger(__name__)

SCHEMA = 1

_SAMPLES, _BLOCK = 64, 4096  # of a file of weights: enough to tell two trainings apart, little enough for every load


def records_folder() -> Path:
    """Where the records lie."""
    return platformdirs.user_data_path("selfdraft") / "tuning"


def belongs_to(folder: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    """What a record of a loaded model hangs on.

    Args:
        folder: the checkpoint.
        described: see `LLM.describe`.

    Raises:
        OSError: a file of the checkpoint cannot be read.
    """
    return {
        "machine": _machine(),
        "build": build_print(folder),
        "mlx": version("mlx"),
        **({"adapter": described["adapter"]["digest"]} if described["adapter"] else {}),
        **{name: described[name] for name in ("device", "blas", "dtype", "kernels")},
    }


def build_print(folder: Path) -> str:
    """A digest that tells builds of a model apart: the configuration, and of weights names, sizes, headers and samples.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("**/*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):  # the first ones of a short file overlap: it is read whole
                file.seek(sample * max(size - _BLOCK, 0) // (_SAMPLES - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def find(wanted: Mapping[str, Any]) -> DepthStart | None:
    """The start stored for what `belongs_to` says; None if there is none, or none that can be used."""
    path = _path(wanted)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema_version"] != SCHEMA or content["belongs_to"] != dict(wanted):
            raise ValueError("it belongs to something else")
        return _start(content["start"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is no record of `selfdraft tune` that can be used, and is ignored (%s)", path, error)
        return None


def store(wanted: Mapping[str, Any], start: DepthStart, **more: Any) -> Path:
    """Keep a start, in place of the one before.

    Args:
        more: what else a reader of the file may want to know.

    Raises:
        SelfdraftError: it cannot be written; the one before stays.
    """
    path = _path(wanted)
    kept = {
        "depth": start.depth,
        "seconds": {str(depth): seconds for depth, seconds in start.seconds.items()},
        "acceptance": list(start.acceptance),
    }
    content = {"schema_version": SCHEMA, "belongs_to": dict(wanted), "start": kept, **more}
    try:
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise SelfdraftError(f"{path} cannot be written ({error.strerror or error}): nothing is kept") from error
    return path


def forget(folder: Path) -> int:
    """Delete all records of a build of a model; returns how many there were.

    Raises:
        OSError: a file of the checkpoint cannot be read, or a record not be deleted.
    """
    build, count = build_print(folder), 0
    for path in sorted(records_folder().glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            ours = content["belongs_to"]["build"] == build
        except (OSError, ValueError, KeyError, TypeError):
            continue  # whatever it is, it is none of this build
        if ours:
            path.unlink(missing_ok=True)
            count += 1
    return count


def _path(wanted: Mapping[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]
    return records_folder() / f"{name}.json"


def _start(stored: Mapping[str, Any]) -> DepthStart:
    """Raises ValueError, TypeError or KeyError for what no measurement can have given."""
    seconds = {int(depth): float(each) for depth, each in stored["seconds"].items()}
    acceptance = [float(rate) for rate in stored["acceptance"]]
    depth = stored["depth"]
    if not {0, 1} <= seconds.keys() or depth not in seconds or min(seconds) < 0:
        raise ValueError("its depths cannot be")
    if not all(0 < each < math.inf for each in seconds.values()) or not all(0 <= rate <= 1 for rate in acceptance):
        raise ValueError("its figures cannot be")
    return DepthStart(int(depth), seconds, acceptance)


def _machine() -> list[str]:
    """The hardware, as far as speed hangs on it. No host's name: containers have a new one at every start."""
    info = mx.device_info()
    return [platform.system(), platform.machine(), _processor(), str(os.cpu_count()), str(info.get("device_name", ""))]


def _processor() -> str:
    """Its name, which `platform` does not know on most Linux systems."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
