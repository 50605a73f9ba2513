"""What a wheel and an sdist must hold, and what may be wrong with one. Builds nothing."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

__all__ = ["LARGEST", "SOURCES", "expected_sdist", "expected_wheel", "problems", "version_of"]

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 100 * 10**6  # bytes that the Python Package Index takes for a file, unless it is asked for more

_SHARE = "packaging/share"
_SDIST = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore")  # hatchling adds the last itself
SOURCES = ("selfdraft", _SHARE, *_SDIST)  # all that an archive is made of
_INFO = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")


def version_of(root: Path = ROOT) -> str:
    """The version that selfdraft/__init__.py states: the one place where it stands."""
    text = (root / "selfdraft" / "__init__.py").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("__version__ = ")]
    return line.partition(" = ")[2].strip('"')


def sources(*folders: str, root: Path = ROOT) -> set[str]:
    """The files in these folders that git has, or would take; relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split("\0") if name and (root / name).is_file()}


def expected_wheel(root: Path = ROOT) -> set[str]:
    """Every file of the package, the man page and completions, and the metadata; nothing else."""
    version = version_of(root)
    shared = {name.removeprefix("packaging/") for name in sources(_SHARE, root=root)}
    return (
        sources("selfdraft", root=root)
        | {f"selfdraft-{version}.data/data/{name}" for name in shared}
        | {f"selfdraft-{version}.dist-info/{name}" for name in _INFO}
    )


def expected_sdist(root: Path = ROOT) -> set[str]:
    """What a wheel is built of, and what a reader wants: no tests, no tools."""
    top = f"selfdraft-{version_of(root)}"
    names = sources("selfdraft", _SHARE, root=root) | {*_SDIST, "PKG-INFO"}
    return {f"{top}/{name}" for name in names}


def _held(archive: Path) -> set[str]:
    """The names of the files in a wheel or an sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {info.filename for info in wheel.infolist() if not info.is_dir()}
    with tarfile.open(archive) as sdist:
        return {member.name for member in sdist.getmembers() if not member.isdir()}


def problems(archive: Path, expected: set[str]) -> list[str]:
    """What is wrong with an archive, a line each."""
    names = _held(archive)
    found = [f"{archive.name} lacks {name}" for name in sorted(expected - names)]
    found += [f"{archive.name} should not hold {name}" for name in sorted(names - expected)]
    found += [
        f"{archive.name}: {name} leads out of it"
        for name in sorted(names)
        if name.startswith("/") or ".." in PurePosixPath(name).parts
    ]
    if archive.stat().st_size > LARGEST:
        found.append(f"{archive.name} has {archive.stat().st_size:,} bytes, more than the {LARGEST:,} that are taken")
    return found
