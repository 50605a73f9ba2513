"""What release tests share: the programs of tools/release, and one build of the wheel and the sdist."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.needs import lacking

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "release"
PYTHON = ROOT / ".venv-packaging" / "bin" / "python"

sys.path.insert(0, str(TOOLS))  # they are programs, and import each other by name


@dataclass(frozen=True)
class Built:
    """What `make dist` makes."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="session")
def packaging_python() -> Path:
    """The interpreter with what builds a release."""
    if not PYTHON.exists():
        lacking("there is no .venv-packaging (sh scripts/setup_aside.sh packaging packaging/requirements.txt)")
    return PYTHON


@pytest.fixture(scope="session")
def git() -> None:
    """Says that this is a checkout: what belongs into an archive is what git knows."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")


@pytest.fixture(scope="session")
def built(packaging_python: Path, git: None, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    environment = {**os.environ, "TZ": "Pacific/Auckland"}
    done = subprocess.run(
        [packaging_python, TOOLS / "dist.py", folder], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)
