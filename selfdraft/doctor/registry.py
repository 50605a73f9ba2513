"""The checks, in the order of the report: each registers itself. One that breaks becomes a finding."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .context import Context
from .finding import Finding

__all__ = ["KINDS", "check", "findings"]

# Modules of this package, each with the checks of a kind.
KINDS = (
    "versions",
    "device",
    "memory",
    "kernels",
    "parity",
    "settings",
    "session_cache",
    "hub_cache",
    "port",
    "fans",
    "model",
)

Run = Callable[[Context], Iterable[Finding]]


@dataclass(frozen=True)
class _Check:
    name: str
    run: Run
    needs_mlx: bool


_CHECKS: dict[str, _Check] = {}


def check(name: str, *, needs_mlx: bool = False) -> Callable[[Run], Run]:
    """Register a check.

    Args:
        name: of its finding where it breaks, or cannot be run.
        needs_mlx: whether it is of no use where MLX cannot be used.
    """

    def register(run: Run) -> Run:
        _CHECKS[name] = _Check(name, run, needs_mlx)
        return run

    return register


def findings(context: Context) -> Iterator[Finding]:
    """Run all checks."""
    for kind in KINDS:
        yield from _imported(kind)
    for each in list(_CHECKS.values()):
        try:
            if each.needs_mlx and context.mlx_problem:
                yield Finding(each.name, "skip", "MLX cannot be used")
            else:
                yield from each.run(context)
        except Exception as error:  # whatever breaks on somebody's machine
            yield _broken(each.name, error)


def _imported(kind: str) -> Iterator[Finding]:
    try:
        importlib.import_module(f"{__package__}.{kind}")
    except Exception as error:
        yield _broken(kind, error)


def _broken(name: str, error: Exception) -> Finding:
    said = " ".join(str(error).split())
    return Finding(
        name,
        "fail",
        f"the check itself broke: {type(error).__name__}: {said}",
        "a check that ends",
        "install selfdraft anew; if that does not help, report it with what `selfdraft doctor --bundle` writes",
    )
