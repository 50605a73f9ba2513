"""Guards greedy parity on the whole grid: 50 prompts x 128 tokens x depths 0-5 x bf16, 8-bit and 4-bit weights.

`make test-full` alone collects it: the grid takes hours on a small CPU. tools/parity_grid.py decodes, one process a
core, and keeps what is done in a journal, so that an interrupted run goes on where it was.

Environment:
    SELFDRAFT_FULL_RESULT: where the summary goes (JSON; per format and depth: prompts equal, tokens compared).
    SELFDRAFT_FULL_PROMPTS, SELFDRAFT_FULL_TOKENS: a smaller grid, to try it out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PROMPTS = int(os.environ.get("SELFDRAFT_FULL_PROMPTS", "50"))
TOKENS = int(os.environ.get("SELFDRAFT_FULL_TOKENS", "128"))
FORMATS = ("bf16", "8-bit", "4-bit")


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary by format."""
    given = os.environ.get("SELFDRAFT_FULL_RESULT")
    output = ROOT / given if given else tmp_path_factory.mktemp("grid") / "parity_grid.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "tools" / "parity_grid.py"), "--output", str(output)]
    command += ["--prompts", str(PROMPTS), "--tokens", str(TOKENS)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))["grid"]
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_every_depth_gives_the_text_of_plain_decoding(grid: dict[str, Any], format: str) -> None:
    result = grid[format]
    assert result["prompts"] == PROMPTS
    assert result["tokens_compared_per_depth"] == PROMPTS * TOKENS
    assert result["prompts_equal_by_depth"] == [PROMPTS] * 6


@pytest.mark.parametrize("format", FORMATS)
def test_deeper_drafts_need_fewer_cycles(grid: dict[str, Any], format: str) -> None:
    """Drafts are really accepted, or equal texts would prove nothing."""
    cycles = grid[format]["trunk_cycles_by_depth"]
    assert cycles[0] == PROMPTS * (TOKENS - 1)
    assert all(deeper <= shallower for shallower, deeper in pairwise(cycles))
    assert cycles[-1] < 0.6 * cycles[0]
