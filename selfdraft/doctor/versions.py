"""Versions: Python, the system, Selfdraft, and the packages that it needs, against the bounds of its own metadata."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from .context import Context
from .finding import Finding
from .registry import check

__all__: list[str] = []

_SHOWN = {"mlx": "selfdraft", "mlx-lm": "selfdraft", "transformers": "mlx-lm"}  # each by whose bounds
_BACK_ENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")


@check("python")
def _python(context: Context) -> Iterator[Finding]:
    bounds = metadata.metadata("selfdraft")["Requires-Python"]
    fits = SpecifierSet(bounds).contains(platform.python_version(), prereleases=True)
    fix = "" if fits else "make an environment with a newer Python, and install selfdraft there"
    yield Finding("python", "ok" if fits else "fail", platform.python_version(), bounds, fix)


@check("system")
def _system(context: Context) -> Iterator[Finding]:
    observed = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform == "darwin":
        observed = f"macOS {platform.mac_ver()[0]}, {platform.machine()}"
        if platform.machine() == "x86_64" and _translated():
            yield Finding(
                "system",
                "fail",
                f"{observed}, translated by Rosetta",
                "a Python for arm64: MLX has no other",
                "install Python for Apple silicon, and selfdraft with it",
            )
            return
    yield Finding("system", "ok", observed)


def _translated() -> bool:
    done = subprocess.run(["sysctl", "-n", "sysctl.proc_translated"], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "1"


@check("selfdraft")
def _selfdraft(context: Context) -> Iterator[Finding]:
    from .. import __version__

    installed = _version("selfdraft")
    if installed == __version__:
        yield Finding("selfdraft", "ok", __version__)
        return
    yield Finding(
        "selfdraft",
        "warn",
        f"{__version__} runs, and {installed or 'none'} is installed",
        "one version",
        "install it anew from where it lies: `make setup`, or pip install .",
    )


@check("packages")
def _packages(context: Context) -> Iterator[Finding]:
    for name, owner in _SHOWN.items():
        yield _package(name, _bounds(owner).get(name))
    wrong = []
    bounds = {name: each for name, each in _bounds("selfdraft").items() if name not in _SHOWN}
    for name, wanted in sorted(bounds.items()):
        installed = _version(name)
        if installed is None or not wanted.contains(installed, prereleases=True):
            wrong.append(f"{name} {installed or 'is missing'} (needs {wanted or 'any'})")
    if wrong:
        yield Finding("packages", "fail", "; ".join(wrong), "what selfdraft's metadata asks for", _install(wrong))
    else:
        yield Finding("packages", "ok", f"{len(bounds)} further packages as selfdraft needs them")


@check("mlx back end")
def _back_end(context: Context) -> Iterator[Finding]:
    """The library behind `mlx` comes as a package of its own, which must be of the same version, and alone."""
    name, version = "mlx back end", _version("mlx")
    found = {each: there for each in _BACK_ENDS if (there := _version(each))}
    observed = ", ".join(f"{each} {there}" for each, there in found.items()) or "none"
    expected = f"one of {', '.join(_BACK_ENDS)}, of version {version}"
    fix = "" if sys.platform == "darwin" else " (Linux: the extra cpu or cuda13 of selfdraft)"
    if len(found) == 1 and version in found.values():
        yield Finding(name, "ok", observed)
    elif len(found) > 1:
        fix = f"pip uninstall {' '.join(found)} mlx, then install selfdraft with one extra: cpu or cuda13"
        yield Finding(name, "fail", f"{observed}: they overwrite each other", expected, fix)
    else:
        yield Finding(name, "fail", observed, expected, f"install mlx=={version} anew with its back end{fix}")


@check("mlx runs")
def _mlx_runs(context: Context) -> Iterator[Finding]:
    if problem := context.mlx_problem:
        yield Finding(
            "mlx runs",
            "fail",
            problem,
            "import mlx.core, and a product of two small matrices",
            "install mlx anew for this machine: on macOS for arm64, on Linux with the extra cpu or cuda13; for cuda13 "
            "the NVIDIA driver must be of version 580 or newer",
        )
    else:
        yield Finding("mlx runs", "ok", "it is imported, and computes")


def _package(name: str, wanted: SpecifierSet | None) -> Finding:
    installed = _version(name)
    expected = str(wanted or "any version")
    if installed is None:
        return Finding(name, "fail", "is not installed", expected, _install([f"{name}{wanted or ''}"]))
    if wanted is not None and not wanted.contains(installed, prereleases=True):
        return Finding(name, "fail", installed, expected, _install([f"{name}{wanted}"]))
    return Finding(name, "ok", installed, expected)


def _install(wanted: list[str]) -> str:
    named = " ".join(f"'{each}'" for each in wanted if "(" not in each)
    return (
        f"pip install {named}" if named else "install selfdraft anew: `make setup`, or pip install --upgrade selfdraft"
    )


def _bounds(owner: str) -> dict[str, SpecifierSet]:
    """The versions that a package asks for, by name, on this system and without extras."""
    try:
        wanted = [Requirement(line) for line in metadata.requires(owner) or ()]
    except metadata.PackageNotFoundError:
        return {}
    here = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {each.name: each.specifier for each in here}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
