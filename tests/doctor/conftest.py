"""The doctor for tests: settings of the test alone, and checks one by one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from selfdraft.cli.settings import kinds
from selfdraft.doctor import registry
from selfdraft.doctor.context import Context
from selfdraft.doctor.finding import Finding

Examined = Callable[..., list[Finding]]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """settings.toml of this test; not there yet."""
    monkeypatch.setenv("SELFDRAFT_CONFIG_DIR", str(tmp_path))
    return tmp_path / "settings.toml"


@pytest.fixture
def examined() -> Examined:
    """Run one check, by its name; `given` is of the context."""

    def run(name: str, *, mlx_problem: str = "", blas_problem: str = "", **given: object) -> list[Finding]:
        for kind in registry.KINDS:
            importlib.import_module(f"selfdraft.doctor.{kind}")
        context = Context(kinds, **given)  # type: ignore[arg-type]
        vars(context).update(mlx_problem=mlx_problem, blas_problem=blas_problem)
        check = registry._CHECKS[name]
        found = list(check.run(context))
        for each in found:
            assert each.status in ("ok", "skip") or (each.fix and each.expected), f"{each} names no fix"
        return found

    return run


def only(found: list[Finding]) -> Finding:
    (each,) = found
    return each
