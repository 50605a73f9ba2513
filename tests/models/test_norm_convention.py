"""Guards how norm weights are told apart: stored as w with an effective weight of 1 + w, or as 1 + w."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from selfdraft.models.checkpoint import classify, norm_convention
from selfdraft.source import REFERENCE, find_model
from tests.support.checkpoints import is_zero_centred


def drawn(mean: float, spread: float, size: int = 512) -> mx.array:
    return mean + spread * mx.random.normal((size,), key=mx.random.key(size))


CONVENTIONS: dict[str, tuple[list[mx.array], str]] = {
    "all zero": ([mx.zeros(64)] * 3, "zero-centred"),
    "all one": ([mx.ones(64)] * 3, "one-plus"),
    "spread around 0": ([drawn(0.0, 0.3)], "zero-centred"),
    "spread around 1": ([drawn(1.0, 0.3)], "one-plus"),
    "w drifted up": ([drawn(0.3, 0.3)], "zero-centred"),
    "w far up, still negative at times": ([drawn(0.45, 0.5)], "zero-centred"),
    "1 + w drifted up": ([drawn(2.5, 1.0)], "one-plus"),
    "1 + w drifted down": ([drawn(0.85, 0.2)], "one-plus"),
    "w up a little, seldom negative": ([drawn(0.3, 0.15)], "zero-centred"),
    "one norm of many drifted far": ([drawn(0.0, 0.1, 512), drawn(6.0, 1.0, 128)], "zero-centred"),
    "one norm of many is tiny": ([drawn(1.0, 0.1, 512), drawn(0.02, 0.01, 128)], "one-plus"),
    "a few negative gains": ([drawn(1.0, 0.1, 512), drawn(-1.0, 0.1, 4)], "one-plus"),
    "bf16": ([drawn(0.0, 0.3).astype(mx.bfloat16)], "zero-centred"),
    "a single value": ([mx.array([1.0])], "one-plus"),
}


@pytest.mark.parametrize("otherwise", ["zero-centred", "one-plus"])
@pytest.mark.parametrize("name", CONVENTIONS)
def test_norm_convention(name: str, otherwise: Any) -> None:
    weights, expected = CONVENTIONS[name]
    assert norm_convention(weights, otherwise) == expected


@pytest.mark.parametrize("otherwise", ["zero-centred", "one-plus"])
@pytest.mark.parametrize("mean", [0.3, 0.5])
def test_values_that_say_nothing_leave_it_to_the_layout(mean: float, otherwise: Any) -> None:
    """Small gains stored as 1 + w (some layers of the reference model have 0.3), or large ones stored as w."""
    assert norm_convention([drawn(mean, 0.05)], otherwise) == otherwise


def test_the_reference_norms_in_both_conventions() -> None:
    """Trained norms drift: the trunk's median is 0.59 as 1 + w."""
    checkpoint = classify(find_model(REFERENCE))
    stored = {name: tensor.astype(mx.float32) for name, tensor in checkpoint.tensors.items() if is_zero_centred(name)}
    assert len(stored) == 21 + 7
    for of_head in (True, False):
        raw = [tensor for name, tensor in stored.items() if name.startswith("mtp.") == of_head]
        assert norm_convention(raw, "one-plus") == "zero-centred"
        assert norm_convention([weight + 1 for weight in raw], "one-plus") == "one-plus"
