"""Guards what a cycle tells the host: counts and tokens as they are, and whether the logits that these hang on are
numbers: no others, and all of them.

The text that GPUs run is run on the host.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from selfdraft.kernels import report as subject
from selfdraft.kernels import small_arrays
from selfdraft.kernels.report import Report, report, report_reference
from tests.support.host_kernels import kernels_on_host, needs_compiler

both = pytest.mark.parametrize("make", [pytest.param(report, marks=needs_compiler), report_reference])


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_host(monkeypatch)


def told(make: Any, *, flaws: list[list[int]], draft_flaws: list[list[int]], coupled: list[int]) -> Report:
    """Of rows of depth 3 that keep one draft, and of depth 1 that keep none."""
    rows = len(flaws)
    drafts = mx.array([[5, 6, 7], [8, 0, 0]] * rows, mx.uint32)[:rows]
    accepted, following, depths = (mx.array(x * rows, mx.int32)[:rows] for x in ([1, 0], [9, 4], [3, 1]))
    given = [mx.array(x, mx.int32) for x in (coupled, flaws, draft_flaws)]
    made: Report = make(accepted, following.astype(mx.uint32), drafts, depths, *given)
    mx.eval(made.parts)
    return made


@both
def test_what_is_told(make: Any) -> None:
    sound: Any = {"flaws": [[0] * 4] * 2, "draft_flaws": [[0, 1, 0]] * 2, "coupled": [0, 0]}
    found = told(make, **sound)
    assert found.read() == ([1, 0], [True, True], [[5, 9, 9, 9], [4, 4, 4, 4]])
    assert (found.tokens.tolist(), found.counts.tolist()) == ([[5, 9, 9, 9], [4, 4, 4, 4]], [2, 1])
    assert (found.tokens.dtype, found.counts.dtype) == (mx.uint32, mx.int32)


@both
@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("coupled", [0, 1])
def test_a_row_hangs_on_its_own_positions(make: Any, position: int, coupled: int) -> None:
    """By rejection on all of its depth and the one behind; by coupling on what is emitted. -inf is none of a draft's
    business."""
    for flaw in (1, 2):
        flaws = [[flaw * (p == position) for p in range(4)]] * 2
        found = told(make, flaws=flaws, draft_flaws=[[0] * 3] * 2, coupled=[coupled] * 2)
        assert found.read()[1] == [position > (1 if coupled else 3), position > (0 if coupled else 1)]
        if position < 3:
            found = told(make, flaws=[[0] * 4] * 2, draft_flaws=[row[:3] for row in flaws], coupled=[coupled] * 2)
            assert found.read()[1] == [flaw == 1 or position > (1 if coupled else 2), flaw == 1 or position > 0]


@needs_compiler
@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize(("rows", "most"), [(1, 0), (1, 1), (1, 3), (1, 6), (1, 7), (5, 4), (6, 4), (2, 16)])
def test_many_and_few(monkeypatch: pytest.MonkeyPatch, on_cuda: bool, rows: int, most: int) -> None:
    """Whole, and in pieces of 8 bytes, as the host reads them on CUDA."""
    monkeypatch.setattr(small_arrays, "backend", lambda: "cuda" if on_cuda else None)
    given = subject._cases(rows, most, rows + most)
    found, expected = report(*given), report_reference(*given)
    assert found.read() == expected.read()
    assert mx.array_equal(found.tokens, expected.tokens)
    assert mx.array_equal(found.counts, expected.counts)
    pieces = {part.size for part in found.parts}
    assert pieces == ({2} if on_cuda and rows * (most + 3) <= 32 else {rows * (most + 3)})


@needs_compiler
def test_the_check_finds_a_draft_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subject._check_error() == 0
    monkeypatch.setattr(subject, "report", lambda accepted, *given: report(accepted + 1, *given))
    assert subject._check_error() > 0


def test_what_does_not_fit_is_refused() -> None:
    accepted, following, drafts, depths, coupled, flaws, draft_flaws = subject._cases(2, 3, 0)
    wrong = [
        (accepted.astype(mx.uint32), following, drafts, depths, coupled, flaws, draft_flaws),
        (accepted, following[:1], drafts, depths, coupled, flaws, draft_flaws),
        (accepted, following, drafts[:, :2], depths, coupled, flaws, draft_flaws),
        (accepted, following, drafts, depths[:1], coupled, flaws, draft_flaws),
        (accepted, following, drafts, depths, coupled[:1], flaws, draft_flaws),
        (accepted, following, drafts, depths, coupled, flaws[:, :3], draft_flaws),
        (accepted, following, drafts, depths, coupled, flaws, draft_flaws[:, :2]),
    ]
    for given in wrong:
        with pytest.raises(ValueError, match="report"):
            report(*given)
