"""Guards that every wrong wiring of a head is told from the right one by how it drafts, whatever the family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from selfdraft.forge.wiring import AS_BUILT, _before, remedy, wirings
from selfdraft.models.base import architecture
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from selfdraft.models.probe import PROBE_TEXT
from selfdraft.source import REFERENCE, find_model
from selfdraft.text import Tokenizer
from tests.models.test_families import write_checkpoint
from tests.reference.families import FAMILIES
from tests.support.nano import nano_model
from tests.support.reference import reference_model

SWAPPED = "the other half for the embedding"
AS_W, AS_ONE_PLUS = "norms stored as w, not 1 + w", "norms stored as 1 + w, not w"
BEFORE = "the hidden before the final norm"
LATE = "a token with its own hidden"


@pytest.fixture(scope="module")
def model() -> Any:
    return reference_model(dtype=mx.float32)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return Tokenizer.from_folder(find_model(REFERENCE)).encode(PROBE_TEXT, special=False)


def found(model: Any, tokens: Sequence[int]) -> dict[str, float]:
    family = architecture("qwen3_5")
    assert family is not None
    return wirings(model, family, tokens)


def test_the_reference_head_drafts_best_as_it_is(model: Any, tokens: list[int]) -> None:
    shares = found(model, tokens)
    assert shares.keys() == {
        AS_BUILT,
        LATE,
        BEFORE,
        SWAPPED,
        AS_W,
        AS_ONE_PLUS,
        f"{SWAPPED} and {AS_W}",
        f"{SWAPPED} and {AS_ONE_PLUS}",
    }
    built = shares.pop(AS_BUILT)
    assert built > 0.5
    assert all(share < built - 0.1 for share in shares.values())


def test_the_head_is_left_as_it_was(model: Any, tokens: list[int]) -> None:
    before = dict(tree_flatten(model.mtp.parameters()))
    found(model, tokens)
    assert all(tensor is before[name] for name, tensor in tree_flatten(model.mtp.parameters()))


def swap(name: str, tensor: mx.array) -> mx.array:
    return mx.concatenate(mx.split(tensor, 2, axis=-1)[::-1], axis=-1) if name == "fc.weight" else tensor


def lower(name: str, tensor: mx.array) -> mx.array:
    return tensor - 1 if "norm" in name else tensor


@pytest.mark.parametrize(
    ("change", "best"),
    [
        ([swap], SWAPPED),
        ([lower], AS_W),
        ([lambda name, tensor: tensor + 1 if "norm" in name else tensor], AS_ONE_PLUS),
        ([swap, lower], f"{SWAPPED} and {AS_W}"),
    ],
)
def test_a_wrong_one_is_found(model: Any, tokens: list[int], change: list[Any], best: str) -> None:
    plain = list(tree_flatten(model.mtp.parameters()))
    made = plain
    for each in change:
        made = [(name, each(name, tensor)) for name, tensor in made]
    model.mtp.load_weights(made)
    try:
        shares = found(model, tokens)
    finally:
        model.mtp.load_weights(plain)
    assert max(shares, key=shares.__getitem__) == best
    assert shares[best] > shares[AS_BUILT] + 0.2


def test_halves_of_a_projection_in_codes_are_swapped(tokens: list[int]) -> None:
    model = reference_model(dtype=mx.float32)
    nn.quantize(model.mtp, group_size=64, bits=8, class_predicate=lambda path, _: path == "fc")
    assert "scales" in model.mtp.fc
    assert found(model, tokens)[SWAPPED] < 0.05
    made = {name: mx.concatenate(mx.split(model.mtp.fc[name], 2, axis=-1)[::-1], axis=-1) for name in model.mtp.fc}
    model.mtp.fc.update(made)
    assert found(model, tokens)[SWAPPED] > 0.5


def test_the_hidden_before_the_norm_is_that() -> None:
    """It is made from the one behind the norm: up to a factor a position, which the head's first norm takes out."""
    model: Any = nano_model(vocab_size=64)
    ids = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    kept: list[mx.array] = []

    class Spy(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm
            self.weight = norm.weight

        def __call__(self, x: mx.array) -> mx.array:
            kept.append(x)
            out: mx.array = self.norm(x)
            return out

    plain = model.model.norm
    assert mx.abs(plain.weight - 1).max().item() > 0.2  # type: ignore[operator]
    model.model.norm = Spy(plain)
    hidden, _ = model.forward(ids, [model.new_state()], keep_steps=False)
    model.model.norm = plain
    drafted = [
        model.draft(ids[:, 1:], fed[:, :-1], [model.new_state()], [0]) for fed in (kept[-1], _before(model, hidden))
    ]
    assert mx.allclose(*drafted, atol=1e-4).item()
    other = model.draft(ids[:, 1:], hidden[:, :-1], [model.new_state()], [0])
    assert not mx.allclose(drafted[0], other, atol=1e-2).item()


@pytest.mark.parametrize(
    ("wiring", "built", "flags"),
    [
        (SWAPPED, "embedding-first", "--head-order hidden-first"),
        (SWAPPED, "", "--head-order hidden-first"),
        (SWAPPED, "hidden-first", "--head-order embedding-first"),
        (AS_W, "", "--head-norms zero-centred"),
        (f"{SWAPPED} and {AS_ONE_PLUS}", "", "--head-order hidden-first --head-norms one-plus"),
        (BEFORE, "", ""),
        (LATE, "", ""),
    ],
)
def test_remedies(wiring: str, built: str, flags: str) -> None:
    assert remedy(wiring, built) == flags


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    """Only how norms are stored is left out, where a family has one way."""
    checkpoint = classify(write_checkpoint(FAMILIES[name], tmp_path))
    model: Any = build_model(checkpoint, with_head=True, dtype=mx.float32).model
    shares = wirings(model, checkpoint.architecture, [index % 40 for index in range(50)])
    other = "the hidden behind the final norm" if getattr(model, "head_before_norm", False) else BEFORE
    norms = {AS_W, AS_ONE_PLUS, f"{SWAPPED} and {AS_W}", f"{SWAPPED} and {AS_ONE_PLUS}"}
    expected = {AS_BUILT, LATE, other, SWAPPED, *(norms if checkpoint.architecture.zero_centred else ())}
    if name.startswith("gemma4"):  # no norm for the hidden, so that its scale matters
        expected -= {other}
    assert shares.keys() == expected
    assert all(0 <= share <= 1 for share in shares.values())
