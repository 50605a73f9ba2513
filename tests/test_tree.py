"""Guards the size of the committed tree: the checkpoint is most of it, and there is room for little else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST = 48 * 2**20


def test_the_committed_tree_stays_small() -> None:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    sizes = {name: (ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file()}
    assert sum(sizes.values()) < MOST, sorted(sizes.items(), key=lambda item: -item[1])[:10]
