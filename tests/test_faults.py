"""Guards that every planted fault can be planted: its text stands once in its file, and its tests are there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def planted() -> list[Any]:
    spec = importlib.util.spec_from_file_location("faults", ROOT / "tools" / "faults" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["faults"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    faults: list[Any] = list(module.FAULTS)
    return faults


@pytest.mark.parametrize("fault", planted(), ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Any) -> None:
    assert (ROOT / "selfdraft" / fault.path).read_text(encoding="utf-8").count(fault.right) == 1
    assert fault.wrong != fault.right
    files = [part for part in fault.tests.split() if part.endswith(".py") or "/" in part]
    assert files
    assert all((ROOT / part.split("::")[0]).exists() for part in files)


def test_names_are_unlike() -> None:
    names = [fault.name for fault in planted()]
    assert len(names) == len(set(names))
