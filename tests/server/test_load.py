"""Guards the server under load: clients that err and leave beside clients whose answers must be as if alone.

It lasts TESTS_LOAD_SECONDS (default 8), on the model TESTS_LOAD_MODEL (default: a nano model). By hand:
TESTS_LOAD_SECONDS=60 TESTS_LOAD_MODEL=reference pytest -s tests/server/test_load.py
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import httpx

from .load import Load, cases
from .test_serve_command import serving

SECONDS = float(os.environ.get("TESTS_LOAD_SECONDS", "8"))
MODEL = os.environ.get("TESTS_LOAD_MODEL", "")


def test_under_load_every_answer_is_as_if_alone_and_nothing_is_left_behind(nano_folder: Path, tmp_path: Path) -> None:
    home = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    journal = tmp_path / "log"
    flags = ["--prefill-chunk", "64", "--log-level", "warning", "--log-file", str(journal)]
    with serving(Path(MODEL) if MODEL else nano_folder, home, *flags) as (process, url):
        load = Load(url, process.pid, cases(28), clients=16, seconds=SECONDS)
        asyncio.run(load.run())
        print(f"\n{load.report()}")
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    assert load.wrong == []
    assert [status for status in load.statuses if status >= 500] == []
    assert re.findall(r'path="(?:/v1/.*|other)",status="5.*', metrics) == []
    assert journal.read_text() == ""
    assert max(state.running for state in load.states) >= 8
    assert min(load.counts[kind] for kind in ("completed", "disconnects", "malformed")) >= 1
    before, after = load.idle
    assert after.arrays < before.arrays + 2, "what rows held is not given back"
    assert load.most(2) < 1.1 * load.most(1) + 32, "memory grows"
