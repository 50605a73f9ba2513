"""Every value out of range is refused by name and value, before anything runs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from selfdraft import InvalidRequest, SamplingParams
from selfdraft.settings import load_settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("depth", None), ("depth", -1), ("depth", "deep"), ("depth", True), ("depth", 1.5),
        ("max_tokens", 0), ("max_tokens", "5"), ("min_tokens", None), ("min_tokens", -1),
        ("temperature", -0.1), ("temperature", 1e-40), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", 10**400), ("temperature", True), ("temperature", "hot"),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("top_k", 2.0), ("min_p", 1.5),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 1e-39), ("repetition_penalty", 0),
        ("logit_bias", [1]), ("logit_bias", {"a": 1}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 101}),
        ("seed", 2**64), ("seed", 1.0), ("stop", 5), ("stop", [""]), ("stop", [3]), ("stop", ["x"] * 17),
        ("logprobs", 21), ("logprobs", -1), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field
    assert field in str(error.value)


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(min_tokens=50, max_tokens=3)


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63)])
def test_seeds(seed: int) -> None:
    assert SamplingParams(seed=seed).seed == seed


def test_stop_in_every_form_clients_send() -> None:
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="prefil_chunk"):
        load_settings(prefil_chunk=3)
    monkeypatch.setenv("SELFDRAFT_PREFILL_CHUNK", "zero")
    with pytest.raises(InvalidRequest, match="zero"):
        load_settings()
    assert load_settings(prefill_chunk=7).prefill_chunk == 7
    monkeypatch.setenv("SELFDRAFT_PREFILL_CHUNK", "")
    assert load_settings().prefill_chunk == 4096
