"""Planted faults: applies each one-line fault to a copy of the project and shows which test catches it.

A fault that no test catches ("survives") means a rule of the project is not guarded; the exit status is then 1. Every
new rule gets a fault here.

    usage: mutants.py [NAME ...]      only the faults whose name contains one of these words
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    words = sys.argv[1:]
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    if not faults:
        print(f"no fault has a name with {' or '.join(words)}")
        return 2
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(Path(folder))
        for fault in faults:
            begin = time.monotonic()
            caught = _try(copy, fault)
            survivors += caught is None
            verdict = f"caught by {caught}" if caught else "SURVIVES"
            print(f"{fault.name}\n    {fault.path}: {verdict}  ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"\n{len(faults) - survivors} faults caught, {survivors} survived")
    return 1 if survivors else 0


def _copy(folder: Path) -> Path:
    """The project without its environments; weights are linked, not copied."""
    copy = folder / "project"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "assets", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=skipped)
    (copy / "selfdraft" / "assets").symlink_to(ROOT / "selfdraft" / "assets")
    return copy


def _try(copy: Path, fault: Fault) -> str | None:
    """Plant a fault, run its tests, take it out again. Returns the first test that failed."""
    path = copy / "selfdraft" / fault.path
    text = path.read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise SystemExit(f"{fault.name}: {fault.path} holds {fault.right!r} {text.count(fault.right)} times, not once")
    path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests.split()],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or not found:
        raise SystemExit(f"{fault.name}: pytest itself failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found.group(1)


if __name__ == "__main__":
    sys.exit(main())
