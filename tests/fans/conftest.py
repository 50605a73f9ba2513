"""A stand-in for ThermalForge, found by this process and by those it starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from selfdraft.fans import thermalforge
from tests.support.thermalforge import StandIn, standing_in


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with standing_in(tmp_path) as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(thermalforge, "_on_macos", lambda: True)
        yield found
