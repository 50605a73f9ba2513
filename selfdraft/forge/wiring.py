"""How a head is wired, asked of the head: each way it could be, by how often it then drafts its trunk's own choice.

Names and labels lie; a head that is fed what it was trained on drafts well, in any other way clearly worse. What is
varied: which half of the projection takes the embedding, how its norms are stored, both together, whether the hidden
is taken before or behind the final norm, and which hidden goes with a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..models.base import Architecture

__all__ = ["AS_BUILT", "remedy", "wirings"]

AS_BUILT = "as built"

_SWAPPED = "the other half for the embedding"
# How norms would be stored -> what is added to them, and the flag of `forge build` that makes them so.
_NORMS = {
    "norms stored as w, not 1 + w": (1.0, "--head-norms zero-centred"),
    "norms stored as 1 + w, not w": (-1.0, "--head-norms one-plus"),
}
_PROJECTIONS = tuple(
    f"{layer}.{part}" for layer in ("fc", "eh_proj", "pre_projection") for part in ("weight", "scales", "biases")
)
_HIDDEN_NORMS = ("hnorm.weight", "pre_fc_norm_hidden.weight")

Change = Callable[[str, mx.array], mx.array]


def wirings(model: Any, family: Architecture, tokens: Sequence[int]) -> dict[str, float]:
    """Share of positions at which the head's first draft is the trunk's own choice, by wiring.

    What cannot be told is left out: norms, where a family stores them in one way; the hidden before the final norm,
    where a head has no norm of its own for it.

    Args:
        model: trunk and head.
        tokens: a text.
    """
    ids, row = mx.array([list(tokens)]), model.new_state()
    hidden, captured = model.forward(ids, [row], keep_steps=False)
    captured.commit([row], [len(tokens)])  # a head may read what the trunk holds
    choice = mx.argmax(model.logits(hidden), axis=-1)

    def agreement(fed: mx.array, late: int = 0) -> float:
        """With `fed` in the hidden's place; late: 1 where a token goes with its own hidden, not the one before it."""
        out = model.draft(ids[:, 1:], fed[:, late : fed.shape[1] - 1 + late], [row.fork()], [0])
        drafted = mx.argmax(model.draft_logits(out, whole=True), axis=-1)
        share: Any = (drafted == choice[:, 1:]).astype(mx.float32).mean().item()
        return float(share)

    found = {AS_BUILT: agreement(hidden), "a token with its own hidden": agreement(hidden, late=1)}
    if getattr(model, "head_before_norm", False):
        found["the hidden behind the final norm"] = agreement(model.model.norm(hidden))
    elif any(name.endswith(_HIDDEN_NORMS) for name in dict(tree_flatten(model.mtp.parameters()))):
        found["the hidden before the final norm"] = agreement(_before(model, hidden))
    for name, changes in _changed_heads(family).items():
        with _changed(model.mtp, changes) as applied:
            if applied:
                found[name] = agreement(hidden)
    return found


def remedy(wiring: str, head_order: str) -> str:
    """Flags of `forge build` that make such a head of the same source; "" if none do.

    Args:
        head_order: the one it was built with.
    """
    flags = []
    if _SWAPPED in wiring:
        other = "embedding-first" if head_order == "hidden-first" else "hidden-first"
        flags.append(f"--head-order {other}")
    flags += [flag for name, (_, flag) in _NORMS.items() if name in wiring]
    return " ".join(flags)


def _before(model: Any, hidden: mx.array) -> mx.array:
    """The hidden before the final norm, but for a factor a position, which a head that begins with a norm drops.

    The norm's weight is what it multiplies by, also in families that store it as w for 1 + w.
    """
    weight = model.model.norm.weight
    return hidden / mx.where(weight == 0, 1, weight)


def _changed_heads(family: Architecture) -> dict[str, list[Change]]:
    """Wiring -> what is done to each parameter of the head."""

    def swapped(name: str, tensor: mx.array) -> mx.array:
        if not name.endswith(_PROJECTIONS):
            return tensor
        return mx.concatenate(list(mx.split(tensor, 2, axis=-1))[::-1], axis=-1)

    def shifted(by: float, zero_centred: Callable[[str], bool]) -> Change:
        return lambda name, tensor: tensor + by if zero_centred(f"mtp.{name}") else tensor

    orders: dict[str, list[Change]] = {"": [], _SWAPPED: [swapped]}
    norms: dict[str, list[Change]] = {"": []}
    if family.zero_centred:
        norms |= {name: [shifted(by, family.zero_centred)] for name, (by, _) in _NORMS.items()}
    return {
        " and ".join(filter(None, (order, norm))): orders[order] + norms[norm]
        for order, norm in product(orders, norms)
        if order or norm
    }


@contextmanager
def _changed(head: Any, changes: Sequence[Change]) -> Iterator[bool]:
    """A head with other parameters; whether any differ."""
    plain: dict[str, mx.array] = dict(tree_flatten(head.parameters()))
    made = dict(plain)
    for change in changes:
        made = {name: change(name, tensor) for name, tensor in made.items()}
    differing = [(name, tensor) for name, tensor in made.items() if tensor is not plain[name]]
    head.load_weights(differing, strict=False)
    try:
        yield bool(differing)
    finally:
        head.load_weights([(name, plain[name]) for name, _ in differing], strict=False)
