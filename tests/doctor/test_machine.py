"""Guards what the doctor says of versions, device, BLAS and memory: each fault of a machine is named with its fix."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
import pytest

import selfdraft.device
from selfdraft import memory
from selfdraft.doctor import versions
from selfdraft.errors import FanError
from selfdraft.fans import thermalforge
from tests.fans.conftest import stand_in
from tests.support.thermalforge import StandIn

from .conftest import Examined, only

GIB = 2**30

__all__ = ["stand_in"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Versions to pretend; None is not installed."""
    pretended: dict[str, str | None] = {}
    real = versions._version
    monkeypatch.setattr(versions, "_version", lambda name: pretended[name] if name in pretended else real(name))
    return pretended


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("mlx", "0.32.4", "ok"),
        ("mlx", "0.32.3", "fail"),
        ("mlx", "0.33.0", "fail"),
        ("mlx", None, "fail"),
        ("mlx-lm", "0.31.0", "fail"),
        ("transformers", "4.57.1", "fail"),  # by mlx-lm's bounds
        ("transformers", None, "fail"),
    ],
)
def test_versions_against_their_bounds(
    examined: Examined, installed: dict[str, str | None], name: str, version: str | None, status: str
) -> None:
    installed[name] = version
    found = next(each for each in examined("packages") if each.name == name)
    assert (found.status, found.observed) == (status, version or "is not installed")
    assert found.expected.startswith((">=", "<"))
    assert status == "ok" or f"pip install '{name}" in found.fix


def test_other_packages_in_one_line(examined: Examined, installed: dict[str, str | None]) -> None:
    installed.update({"typer": "0.1.0", "rich": None})
    found = next(each for each in examined("packages") if each.name == "packages")
    assert found.status == "fail"
    assert "rich is missing" in found.observed
    assert "typer 0.1.0" in found.observed
    installed.clear()
    assert next(each for each in examined("packages") if each.name == "packages").status == "ok"


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"mlx-cpu": "0.32.4"}, "ok"),
        ({"mlx-cpu": "0.32.2"}, "fail"),
        ({}, "fail"),
        ({"mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"}, "fail"),
    ],
)
def test_the_library_behind_mlx(
    examined: Examined, installed: dict[str, str | None], found: dict[str, str], status: str
) -> None:
    installed.update(dict.fromkeys(versions._BACK_ENDS), mlx="0.32.4", **found)
    told = only(examined("mlx back end"))
    assert told.status == status
    assert ("overwrite each other" in told.observed) == ("pip uninstall" in told.fix) == (len(found) == 2)


def test_python_and_selfdraft(
    examined: Examined, installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert only(examined("python")).status == only(examined("selfdraft")).status == "ok"
    monkeypatch.setattr("platform.python_version", lambda: "3.10.2")
    found = only(examined("python"))
    assert (found.status, found.observed, found.expected) == ("fail", "3.10.2", ">=3.11")
    for other in ("0.0.9", None):
        installed["selfdraft"] = other
        assert only(examined("selfdraft")).status == "warn"


def test_without_metadata_nothing_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    assert versions._bounds("selfdraft") == {}


def test_rosetta(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(subprocess, "run", lambda *given, **how: SimpleNamespace(stdout="1\n"))
    assert only(examined("system")).status == "fail"
    monkeypatch.setattr(subprocess, "run", lambda *given, **how: SimpleNamespace(stdout="0\n"))
    assert only(examined("system")).status == "ok"


def test_a_gpu_that_is_not_used(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = only(examined("device"))
    assert found.status == "ok"
    assert found.observed.startswith("CPU: ")
    assert found.figures["back_end"] == "cpu"
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    found = only(examined("device"))
    assert found.status == "warn"
    assert "cuda13" in found.fix
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert "an Apple GPU" in only(examined("device")).observed


@pytest.mark.parametrize(
    ("blas", "wanted", "problem", "status"),
    [
        ("openblas", "auto", "", "ok"),
        ("system", "auto", "", "ok"),
        ("reference", "auto", "", "warn"),
        ("reference", "reference", "", "ok"),
        ("reference", "openblas", "OpenBLAS is not in use", "fail"),
    ],
)
def test_blas(
    examined: Examined, monkeypatch: pytest.MonkeyPatch, blas: str, wanted: str, problem: str, status: str
) -> None:
    monkeypatch.setattr(selfdraft.device, "active_blas", lambda: blas)
    monkeypatch.setenv("SELFDRAFT_BLAS", wanted)
    found = only(examined("blas", blas_problem=problem))
    assert found.status == status
    assert status == "ok" or "apt install libopenblas0-pthread" in found.fix


def test_a_dtype_that_the_chip_emulates(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(examined("dtype")).status == "ok"
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "applegpu_g13s"})
    assert "float16" in only(examined("dtype")).observed
    monkeypatch.setenv("SELFDRAFT_DTYPE", "bfloat16")
    found = only(examined("dtype"))
    assert (found.status, found.expected) == ("warn", "float16")


@pytest.mark.parametrize(("available", "swapped", "expected"), [(8, 0, "ok ok"), (1, 0, "warn ok"), (8, 5, "ok warn")])
def test_memory_and_swap(
    examined: Examined, monkeypatch: pytest.MonkeyPatch, available: int, swapped: int, expected: str
) -> None:
    total = 16 * GIB
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=available * GIB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=total, used=swapped * GIB))
    found = examined("memory")
    assert " ".join(each.status for each in found) == expected
    assert found[0].observed == f"{available}.0 GiB of 16.0 GiB free"


@pytest.mark.parametrize(("limit", "status"), [("", "ok"), ("5GiB", "ok"), ("9GiB", "warn"), ("20GiB", "warn")])
def test_the_memory_limit(examined: Examined, monkeypatch: pytest.MonkeyPatch, limit: str, status: str) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * GIB)
    monkeypatch.setattr(memory, "device_memory", lambda: 16 * GIB)
    monkeypatch.setenv("SELFDRAFT_MEMORY_LIMIT", limit)
    found = only(examined("memory limit"))
    assert found.status == status
    assert ("more than the 16.0 GiB" in found.observed) == (limit == "20GiB")


def test_the_wired_limit_of_macos(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(examined("wired limit")).status == "skip"
    monkeypatch.setattr(sys, "platform", "darwin")
    asked: list[Any] = []

    def run(command: list[str], **how: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="24000\n")

    monkeypatch.setattr(subprocess, "run", run)
    found = only(examined("wired limit"))
    assert (found.status, found.observed) == ("ok", "24000 MB")
    assert asked == [["sysctl", "-n", "iogpu.wired_limit_mb"]]


def test_fans(examined: Examined, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the mode max finds them, also where PATH lacks Homebrew's folder."""
    found = only(examined("fans"))
    assert (found.status, found.observed) == ("ok", f"ThermalForge: {thermalforge.find().executable}, fans automatic")
    stand_in.plan("status", "garbage")
    found = only(examined("fans"))
    assert (found.status, "thermalforge install" in found.fix) == ("warn", True)
    monkeypatch.setattr(thermalforge, "find", lambda: (_ for _ in ()).throw(FanError(f"none: {thermalforge.INSTALL}")))
    found = only(examined("fans"))
    assert (found.status, found.fix) == ("skip", thermalforge.INSTALL)


def test_fans_of_other_systems(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thermalforge, "_on_macos", lambda: False)
    found = only(examined("fans"))
    assert (found.status, "for Macs" in found.observed) == ("skip", True)
