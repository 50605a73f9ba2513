"""How a head is wired, asked of the head: each way it could be, by how often it then drafts its trunk's own choice.

Names and labels lie; a head that is fed what it was trained on drafts well, in any other way hardly at all. What is
varied: which half of the projection takes the embedding, how its norms are stored, whether the hidden is taken before
or behind the final norm, and which hidden goes with a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..models.base import Architecture

__all__ = ["AS_BUILT", "wirings"]

AS_BUILT = "as built"

_PROJECTIONS = tuple(f"{layer}.{part}" for layer in ("fc", "eh_proj") for part in ("weight", "scales", "biases"))


def wirings(model: Any, family: Architecture, tokens: Sequence[int]) -> dict[str, float]:
    """Share of positions at which the head's first draft is the trunk's own choice, by wiring.

    Args:
        model: trunk and head.
        tokens: a text.
    """
    row = model.new_state()
    ids = mx.array([list(tokens)])
    hidden, _ = model.forward(ids, [row], keep_steps=False)
    choice = mx.argmax(model.logits(hidden), axis=-1)

    def agreement(fed: mx.array, late: int = 0) -> float:
        """With `fed` in the hidden's place; late: 1 where a token goes with its own hidden, not the one before it."""
        state = model.new_state()
        out = model.draft(ids[:, 1:], fed[:, late : fed.shape[1] - 1 + late], [state], [0])
        drafted = mx.argmax(model.draft_logits(out, whole=True), axis=-1)
        share: Any = (drafted == choice[:, 1:]).astype(mx.float32).mean().item()
        return float(share)

    found = {AS_BUILT: agreement(hidden), "a token with its own hidden": agreement(hidden, late=1)}
    found[_other_hidden(model)] = agreement(_other(model, hidden))
    for name, change in _changes(family).items():
        with _changed(model.mtp, change) as applied:
            if applied:
                found[name] = agreement(hidden)
    return found


def _other_hidden(model: Any) -> str:
    return "the hidden behind the final norm" if _before(model) else "the hidden before the final norm"


def _before(model: Any) -> bool:
    return bool(getattr(model, "head_before_norm", False))


def _other(model: Any, hidden: mx.array) -> mx.array:
    """The other side of the final norm. The head begins with a norm of its own, so that a scale does not matter."""
    norm = model.model.norm
    if _before(model):
        out: mx.array = norm(hidden)
        return out
    weight = norm.weight
    return hidden / mx.where(weight == 0, 1, weight)


def _changes(family: Architecture) -> dict[str, Callable[[str, mx.array], mx.array]]:
    """Wiring -> a parameter of the head as it would be."""

    def swapped(name: str, tensor: mx.array) -> mx.array:
        if not name.endswith(_PROJECTIONS):
            return tensor
        return mx.concatenate(list(mx.split(tensor, 2, axis=-1))[::-1], axis=-1)

    def shifted(by: float) -> Callable[[str, mx.array], mx.array]:
        zero_centred = family.zero_centred
        return lambda name, tensor: tensor + by if zero_centred and zero_centred(f"mtp.{name}") else tensor

    return {
        "the other half for the embedding": swapped,
        "norms stored as w, not 1 + w": shifted(1),
        "norms stored as 1 + w, not w": shifted(-1),
    }


@contextmanager
def _changed(head: Any, change: Callable[[str, mx.array], mx.array]) -> Iterator[bool]:
    """A head with other parameters; whether any differ."""
    plain: dict[str, mx.array] = dict(tree_flatten(head.parameters()))
    made = {name: change(name, tensor) for name, tensor in plain.items()}
    differing = [(name, tensor) for name, tensor in made.items() if tensor is not plain[name]]
    head.load_weights(differing, strict=False)
    try:
        yield bool(differing)
    finally:
        head.load_weights([(name, plain[name]) for name, _ in differing], strict=False)
