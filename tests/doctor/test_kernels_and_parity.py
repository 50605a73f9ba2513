"""Guards what the doctor says of kernels and of claim 2: a difference is never called none, and not more than it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from selfdraft.device import active_blas
from selfdraft.doctor import parity_matrix as matrices
from selfdraft.doctor.finding import Finding
from selfdraft.doctor.parity_matrix import FORMATS, Parity, parity_matrix
from selfdraft.kernels import portable, self_check
from selfdraft.kernels.self_check import SelfCheck

from .conftest import Examined, only


def broken() -> float:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("error", "gain", "status", "said"),
    [
        (lambda: 0.001, None, "ok", "in use: differs from its reference by 0.001"),
        (lambda: 0.001, lambda: 1.5, "ok", "1.50 times as fast as MLX's own"),
        (lambda: 0.001, lambda: 0.8, "ok", "left out, for MLX is faster here"),
        (lambda: 0.5, None, "warn", "left out: it differs from its reference by 0.5, more than 0.01"),
        (lambda: float("nan"), None, "warn", "left out: it differs"),
        (broken, None, "warn", "left out: it cannot be run here: no such instruction"),
    ],
)
def test_the_verdict_on_a_kernel(
    examined: Examined,
    monkeypatch: pytest.MonkeyPatch,
    error: Callable[[], float],
    gain: Callable[[], float] | None,
    status: str,
    said: str,
) -> None:
    monkeypatch.setattr(self_check, "backend", lambda: "cuda")
    monkeypatch.setattr(portable, "backend", lambda: "cuda")
    monkeypatch.setattr(self_check, "_CHECKS", [])
    SelfCheck("mine", error, 0.01, gain)
    found = only(examined("kernels"))
    assert (found.name, found.status) == ("kernel mine", status)
    assert said in found.observed
    assert found.figures["used"] == ("in use" in found.observed)


def test_without_a_gpu_there_are_none(examined: Examined) -> None:
    assert only(examined("kernels")).status == "skip"


def test_parity_is_measured_only_where_it_is_asked_for(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "parity_matrix", lambda widths: iter([Parity("float32", [0.0], [0.0])]))
    assert only(examined("parity")).status == "skip"
    assert only(examined("parity", parity=True)).status == "ok"


@pytest.mark.skipif(active_blas() != "reference", reason="claimed for reference BLAS only")
def test_reference_blas_is_exact_in_every_format() -> None:
    found = list(parity_matrix(4))
    assert [each.format for each in found] == list(FORMATS)
    for each in found:
        assert each.exact, each
        assert len(each.product) == len(each.forward) == 4


@pytest.mark.parametrize("what", ["product", "forward"])
def test_a_difference_is_seen_at_its_width(monkeypatch: pytest.MonkeyPatch, examined: Examined, what: str) -> None:
    """Products of exactly three rows are off by a little: alone, or in the model."""
    right = nn.Linear.__call__

    def off(layer: Any, x: mx.array) -> mx.array:
        y = right(layer, x)
        return y + 1e-3 if x.shape[-2] == 3 and (layer.weight.shape == (1024, 384)) else y

    monkeypatch.setattr(nn.Linear, "__call__", off)
    monkeypatch.setattr(matrices, "FORMATS", ("float32",))
    if what == "forward":
        monkeypatch.setattr(matrices, "_MATRICES", ((1024, 384),))
    found = only(list(parity_matrix(4)))
    differences: list[float] = getattr(found, what)
    assert [difference > 0 for difference in differences] == [False, False, True, False]
    assert not found.exact
    monkeypatch.setattr(matrices, "parity_matrix", lambda widths: iter([found]))
    said = only(examined("parity", parity=True))
    assert said.status == "warn"
    assert "at width 3" in said.observed
    assert "--depth 0" in said.fix


def test_depth_says_how_wide(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(matrices, "parity_matrix", lambda widths: asked.append(widths) or iter(()))  # type: ignore[func-returns-value]
    monkeypatch.setenv("SELFDRAFT_MAX_DEPTH", "3")
    assert examined("parity", parity=True) == []
    monkeypatch.delenv("SELFDRAFT_MAX_DEPTH")
    examined("parity", parity=True)
    assert asked == [4, 9]


def test_what_is_no_number_is_not_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "FORMATS", ("float32",))
    monkeypatch.setattr(nn.Linear, "__call__", lambda layer, x: x @ layer.weight.T * mx.nan)
    with pytest.raises(ArithmeticError):
        list(parity_matrix(2))


def test_a_summary() -> None:
    from selfdraft.doctor.parity import _finding

    found: Finding = _finding(Parity("float16", [0.0, 0.0, 0.25], [0.0, 0.5, 0.125]))
    assert found.observed == "product: up to 0.25 at width 3; forward: up to 0.5 at widths 2, 3"
    assert found.figures == {"product": [0.0, 0.0, 0.25], "forward": [0.0, 0.5, 0.125]}
