"""Guards `selfdraft.json`: what cannot be right in one is an error that names it, and never a traceback at load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfdraft.errors import CheckpointError
from selfdraft.stamp import STAMP, Stamp, read_stamp, write_stamp

GOOD: dict[str, Any] = {"schema_version": 1, "recipe": {"draft_vocabulary": 512}, "source": "owner/name"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_stamp(tmp_path) is None
    stamp = Stamp({"bits": 4}, "owner/name", verdict="no", reasons=("it is slow",), depth_limit=3)
    write_stamp(tmp_path, stamp)
    assert read_stamp(tmp_path) == stamp
    assert (stamp.limited(8), stamp.limited(2), stamp.notes) == (3, 2, ["`forge verify` said no: it is slow"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema_version": 2},
        {"recipe": []},
        {"recipe": {"draft_vocabulary": "x"}},
        {"recipe": {"draft_vocabulary": -1}},
        {"source": None},
        {"verdict": 1},
        {"reasons": ["slow", 3]},
        {"reasons": 3},
        {"depth_limit": -1},
        {"depth_limit": True},
        {"another": 1},
    ],
    ids=str,
)
def test_what_cannot_be_right_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / STAMP).write_text(json.dumps(GOOD | wrong))
    with pytest.raises(CheckpointError, match=r"selfdraft\.json: cannot be read .*forge verify"):
        read_stamp(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\\xff"], ids=lambda text: text[:3])
def test_what_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / STAMP).write_text(text)
    with pytest.raises(CheckpointError, match=r"selfdraft\.json: cannot be read"):
        read_stamp(tmp_path)
