"""Memory: what is free, what is swapped out, and what the settings let a model use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from .context import Context
from .finding import Finding
from .registry import check

__all__: list[str] = []

_LITTLE = 0.1  # of the machine's memory: less than this free is worth a word
_SWAPPED = 0.25  # likewise, of it swapped out


@check("memory")
def _memory(context: Context) -> Iterator[Finding]:
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    observed = f"{_gib(memory.available)} of {_gib(memory.total)} free"
    figures = {"total": memory.total, "available": memory.available, "swap_used": swap.used, "swap_total": swap.total}
    if memory.available < _LITTLE * memory.total:
        fix = "close programs that hold much of it"
        yield Finding("memory", "warn", observed, f"a tenth at least: {_gib(_LITTLE * memory.total)}", fix, figures)
    else:
        yield Finding("memory", "ok", observed, figures=figures)
    observed = f"{_gib(swap.used)} of {_gib(swap.total)} used"
    if swap.used > _SWAPPED * memory.total:
        fix = (
            "close programs, or take a smaller or a quantised model: weights that are swapped out are read every token"
        )
        yield Finding("swap", "warn", observed, f"less than {_gib(_SWAPPED * memory.total)}", fix)
    else:
        yield Finding("swap", "ok", observed)


@check("wired limit")
def _wired(context: Context) -> Iterator[Finding]:
    if sys.platform != "darwin":
        yield Finding("wired limit", "skip", "macOS alone has one")
        return
    asked = ["sysctl", "-n", "iogpu.wired_limit_mb"]
    limit = int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    observed = f"{limit} MB" if limit else "the system's own"
    hint = "for a larger model: sudo sysctl iogpu.wired_limit_mb=MB, some 4,000 below all there is; until a restart"
    yield Finding("wired limit", "ok", observed, fix=hint, figures={"wired_limit_mb": limit})


@check("memory limit", needs_mlx=True)
def _limit(context: Context) -> Iterator[Finding]:
    from ..memory import device_memory, free_memory

    free, most, limit = free_memory(), device_memory(), context.settings.memory_limit
    name, figures = "memory limit", {"free": free, "device": most, "limit": None if limit is None else int(limit)}
    if limit is None:
        yield Finding(name, "ok", f"none: a model may use the {_gib(free)} that are free", figures=figures)
    elif limit > most:
        yield Finding(
            name,
            "warn",
            f"{_gib(limit)}, more than the {_gib(most)} that this device has",
            f"{_gib(most)} at the most",
            "selfdraft settings set memory_limit SIZE; as it is, the system may swap, or end the process",
            figures,
        )
    elif limit > free:
        fix = "close other programs, or set memory_limit lower; it is obeyed as it is"
        yield Finding(name, "warn", f"{_gib(limit)}, and {_gib(free)} are free now", "what is free", fix, figures)
    else:
        yield Finding(name, "ok", f"{_gib(limit)} for weights, answers and warm prefixes", figures=figures)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
