"""Stand-ins for systemctl and launchctl: they write down what they are called with, and answer from files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import constants

_SCRIPT = """\
#!/bin/sh
printf '%s\\n' "$*" >> "{folder}/calls"
for word in "$@"; do
    if [ -f "{folder}/say-$word" ]; then cat "{folder}/say-$word"; fi
    if [ -f "{folder}/fail-$word" ]; then cat "{folder}/fail-$word" >&2; exit 1; fi
done
{more}
"""


@dataclass(frozen=True)
class StandIn:
    """A program that was put in place of a service manager's."""

    folder: Path

    def says(self, word: str, text: str) -> None:
        """What it prints when called with a word."""
        (self.folder / f"say-{word}").write_text(text)

    def fails(self, word: str, text: str) -> None:
        """What it fails with when called with a word."""
        (self.folder / f"fail-{word}").write_text(text)

    def calls(self) -> list[str]:
        """What it was called with since the last time this was asked."""
        path = self.folder / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found


def stand_in(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, more: str = "") -> StandIn:
    """Put a stand-in first on the PATH."""
    folder = folder / "stand-in"
    folder.mkdir()
    program = folder / name
    program.write_text(_SCRIPT.format(folder=folder, more=more.replace("{folder}", str(folder))))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return StandIn(folder)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has nothing yet; a space and a percent sign in the path are no accident."""
    folder = tmp_path / "home of 100%"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("SELFDRAFT_CONFIG_DIR", str(folder / "config"))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / ".cache/huggingface/hub"))  # read at import
    monkeypatch.delenv("SELFDRAFT_SSD_SESSION_CACHE")
    monkeypatch.delenv("SELFDRAFT_BLAS")
    return folder
