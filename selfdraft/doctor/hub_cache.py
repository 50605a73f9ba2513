"""The folder that models are downloaded to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from .context import Context
from .finding import Finding
from .folders import nearest, write_problem
from .registry import check

__all__: list[str] = []

_ROOM = 20e9  # bytes: a small quantised model, and what else a system needs


@check("hub cache")
def _hub_cache(context: Context) -> Iterator[Finding]:
    from huggingface_hub import constants

    from ..hub.cache import cache_folder

    folder = cache_folder()
    free = shutil.disk_usage(nearest(folder)).free
    offline = "; HF_HUB_OFFLINE is set: nothing is downloaded" if constants.HF_HUB_OFFLINE else ""
    observed, figures = f"{folder}: {free / 1e9:,.0f} GB free{offline}", {"free": free}
    if problem := write_problem(folder):
        fix = "set HF_HOME to a folder that can be written, or take local folders as models"
        yield Finding("hub cache", "warn", problem, "a folder that can be written", fix, figures)
    elif free < _ROOM:
        fix = "make room (`hf cache ls` lists models), or set HF_HOME to another disk"
        yield Finding("hub cache", "warn", observed, f"{_ROOM / 1e9:.0f} GB for a model", fix, figures)
    else:
        yield Finding("hub cache", "ok", observed, figures=figures)
