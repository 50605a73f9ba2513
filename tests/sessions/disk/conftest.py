"""What holds for these tests: nothing is forced onto the disk, which takes most of the time and shows in no test."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
