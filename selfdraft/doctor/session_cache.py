"""The folder of warm prefixes: whether it can be written, what it holds, and what in it is of no use."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from .context import Context
from .finding import Finding
from .folders import write_problem
from .registry import check

__all__: list[str] = []

_FIX = "selfdraft cache verify"


@check("session cache")
def _session_cache(context: Context) -> Iterator[Finding]:
    from ..sessions.disk.upkeep import survey

    settings, name = context.settings, "session cache"
    folder, most = settings.session_folder, int(settings.ssd_session_cache_max_bytes)
    if settings.ssd_session_cache == "off":
        yield Finding(name, "skip", "ssd_session_cache is off")
        return
    if problem := write_problem(folder):
        fix = "selfdraft settings set ssd_session_cache_dir FOLDER, one that can be written, or ssd_session_cache off"
        yield Finding(name, "warn", f"{problem}: nothing is kept over a restart", "a folder that can be written", fix)
        return
    try:
        found = survey(folder)
    except (OSError, sqlite3.Error) as error:
        fix = f"stop what uses it (`selfdraft stop`), then {_FIX}; `selfdraft cache clear` begins anew"
        yield Finding(name, "warn", f"{folder} cannot be read: {error}", "an index that can be read", fix)
        return
    records = sum(group.records for group in found.groups)
    observed = f"{folder}: {records} records, {_mb(found.bytes)} of {_mb(most)}"
    figures = {
        "bytes": found.bytes,
        "max_bytes": most,
        "records": records,
        "orphans": found.orphans,
        "incomplete": found.incomplete,
    }
    problems, fixes = [], []
    if found.bytes > most:
        problems.append("more than its limit")
        fixes.append("selfdraft cache gc")
    if found.orphans:
        problems.append(f"{found.orphans} files that no record needs, unless a server writes just now")
        fixes.append("selfdraft cache gc --keep all")
    if found.incomplete:
        problems.append(f"{found.incomplete} records that cannot be read whole")
        fixes.append(_FIX)
    if problems:
        expected = "within its limit, every file needed, every record whole"
        yield Finding(name, "warn", f"{observed}; {'; '.join(problems)}", expected, "; ".join(fixes), figures)
    else:
        yield Finding(name, "ok", observed, figures=figures)


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
