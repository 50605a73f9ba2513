"""kill -9 at every step of opening, writing, evicting and closing: never a wrong array, no leftovers. See `killed`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import selfdraft

SHARES = 3  # of the steps, so that several workers can walk them
IN_MEMORY = Path("/dev/shm")


@pytest.mark.parametrize("share", range(SHARES))
def test_every_step(share: int, tmp_path: Path) -> None:
    place = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else tmp_path  # else it waits for the disk
    with tempfile.TemporaryDirectory(dir=place) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.sessions.disk.killed", folder, str(share + 1), str(SHARES)],
            cwd=Path(selfdraft.__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 30
