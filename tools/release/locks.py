"""Pins every dependency of each target with the hashes of its files: packaging/locks.

uv resolves against the Python Package Index; hashes are the SHA-256 that the index states for each file of a release,
and pip compares them with what it fetched. Pins that still fit stay as they are.

    usage: locks.py [--upgrade]      with --upgrade, take the newest release of everything
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LOCKS", "TARGETS", "Pin", "Target", "pins", "resolve"]

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "packaging" / "locks"


@dataclass(frozen=True)
class Target:
    """A kind of machine.

    Attributes:
        name: of its lock.
        platform: as uv has it.
        extra: of pyproject.toml; empty where MLX brings its back end itself.
    """

    name: str
    platform: str
    extra: str

    @property
    def lock(self) -> Path:
        return LOCKS / f"{self.name}.txt"


@dataclass(frozen=True)
class Pin:
    """A release that a lock pins: the SHA-256 sums of its files, and the names of what depends on it."""

    version: str
    hashes: set[str]
    wanted_by: set[str]


TARGETS = (
    Target("linux-cpu", "x86_64-manylinux_2_35", "cpu"),
    Target("linux-cuda13", "x86_64-manylinux_2_35", "cuda13"),
    Target("macos-arm64", "aarch64-apple-darwin", ""),
)
_MACOS = "14.0"  # MLX has wheels from there on
_PYTHON = "3.11"  # the oldest that pyproject.toml allows


def resolve(target: Target, *options: str, python: str = _PYTHON) -> str:
    """What uv resolves pyproject.toml to for a target; wheels alone, as MLX has nothing else."""
    extra = ["--extra", target.extra] if target.extra else []
    command = [
        *[
            str(Path(sys.executable).parent / "uv"),
            "pip",
            "compile",
            "--quiet",
            "--no-config",
            "--only-binary",
            ":all:",
        ],
        *["--python-platform", target.platform, "--python-version", python],
        *[*extra, *options, "pyproject.toml"],
    ]
    # No setting of this machine may lead uv to another index.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    environment["MACOSX_DEPLOYMENT_TARGET"] = _MACOS
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{target.name} cannot be resolved")
    return done.stdout


def pins(text: str) -> dict[str, Pin]:
    """What a lock pins, by name."""
    found: dict[str, Pin] = {}
    for line in text.splitlines():
        words = line.split()
        if line[:1].isalnum():
            name, _, version = words[0].partition("==")
            found[name] = last = Pin(version, set(), set())
        elif line.lstrip().startswith("--hash=sha256:"):
            last.hashes.add(words[0].removeprefix("--hash=sha256:"))
        elif line.startswith("    #") and words[-1] != "via":
            last.wanted_by.add(words[2] if words[1] == "via" else words[1])
    return found


def main() -> int:
    LOCKS.mkdir(parents=True, exist_ok=True)
    for target in TARGETS:
        resolve(
            target,
            *["--generate-hashes", "--custom-compile-command", "make locks"],
            *["--output-file", str(target.lock), *sys.argv[1:]],
        )
        print(f"{target.lock.relative_to(ROOT)}: {len(pins(target.lock.read_text(encoding='utf-8')))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
