"""The kernels of our own: whether each agrees with its reference on this device, and is faster than what MLX has."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .context import Context
from .finding import Finding
from .registry import check

if TYPE_CHECKING:
    from ..kernels.self_check import SelfCheck

__all__: list[str] = []


@check("kernels", needs_mlx=True)
def _kernels(context: Context) -> Iterator[Finding]:
    from .. import kernels
    from ..kernels.portable import backend
    from ..kernels.self_check import self_checks

    if backend() is None:
        yield Finding("kernels", "skip", "no GPU: MLX's own operations do all")
        return
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    for each in sorted(self_checks(), key=lambda check: check.name):
        yield _verdict(each)


def _verdict(each: SelfCheck) -> Finding:
    name, passed = f"kernel {each.name}", each.passed
    measured = "" if each.found_error is None else f"differs from its reference by {each.found_error:.2g}"
    if each.found_gain is not None:
        measured += f", {each.found_gain:.2f} times as fast as MLX's own"
    figures = {"used": passed, "error": each.found_error, "most": each.most, "gain": each.found_gain}
    if passed:
        return Finding(name, "ok", f"in use: {measured}", f"at most {each.most:.2g}", figures=figures)
    if each.slower:
        return Finding(name, "ok", f"left out, for MLX is faster here: {measured}", figures=figures)
    return Finding(
        name,
        "warn",
        f"left out: {each.reason}",
        f"a difference of at most {each.most:.2g}",
        "decoding is right without it, and slower: update mlx and the driver; if that does not help, report it with "
        "the file that `selfdraft doctor --bundle` writes",
        figures,
    )
