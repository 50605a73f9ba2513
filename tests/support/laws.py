"""Exact laws on a toy vocabulary: every way a cycle can go, with its probability, in float64.

Only the engine's own acceptance functions decide here; this file enumerates what they are given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from selfdraft.engine.accept import RejectionRule, correction_weights

__all__ = ["Cycle", "Floats", "Table", "Tokens", "emissions", "joint_law", "total_variation", "true_law"]

Floats = npt.NDArray[np.float64]
Tokens = tuple[int, ...]
# A law of the next token for every context.
Table = Callable[[Tokens], Floats]


@dataclass
class Cycle:
    """A draft sequence that a cycle may try, out of a context.

    Attributes:
        context: tokens emitted so far.
        drafts: tokens drafted, before any is dropped.
        probability: of drafting them.
        depth: how many of them are verified.
        ratio_laws: what the verifier takes for q, one a draft; None: the laws they were drawn from.
        memory: carried to the outcomes.
    """

    context: Tokens
    drafts: Tokens
    probability: float
    depth: int
    ratio_laws: list[Floats] | None = None
    memory: int = 0
    outcomes: list[tuple[float, int, Tokens]] = field(default_factory=list)  # probability, accepted, tokens


def true_law(p: Table, vocabulary: int, tokens: int) -> Floats:
    """Joint law of the first `tokens` tokens of autoregressive decoding, [V] * tokens."""
    law = np.ones((vocabulary,) * tokens)
    for sequence in itertools.product(range(vocabulary), repeat=tokens):
        for i, token in enumerate(sequence):
            law[sequence] *= p(sequence[:i])[token]
    return law


def total_variation(a: Floats, b: Floats) -> float:
    """Half the L1 distance."""
    return 0.5 * float(np.abs(a - b).sum())


def emissions(rule: RejectionRule, cycles: list[Cycle], p: Table, q: Table, vocabulary: int, pad: int = 0) -> None:
    """Fill in the outcomes of cycles, all in one padded batch.

    Args:
        pad: columns beyond the deepest row, filled (as all padding) with laws that would do harm if they were read.
    """
    width = max(cycle.depth for cycle in cycles) + pad
    count = len(cycles)
    p_rows = np.zeros((count, width + 1, vocabulary))
    q_rows = np.zeros((count, width, vocabulary))
    drafts = np.zeros((count, width), dtype=np.int32)
    p_rows[..., 0] = q_rows[..., -1] = 1  # padding: p and q disjoint; its draft 0 has q = 0, a ratio of 1 / 0
    for row, cycle in enumerate(cycles):
        for i in range(cycle.depth + 1):
            context = cycle.context + cycle.drafts[:i]
            p_rows[row, i] = p(context)
            if i < cycle.depth:
                q_rows[row, i] = q(context) if cycle.ratio_laws is None else cycle.ratio_laws[i]
                drafts[row, i] = cycle.drafts[i]
    with mx.stream(mx.cpu):  # float64 lives there only
        p_mx, q_mx, drafts_mx = mx.array(p_rows, dtype=mx.float64), mx.array(q_rows, dtype=mx.float64), mx.array(drafts)
        depths = mx.array([cycle.depth for cycle in cycles])
        passing, scale = rule.pass_probabilities(p_mx, q_mx, drafts_mx, depths)
        passes = np.array(passing)
        for pattern in itertools.product((False, True), repeat=width):
            chances = np.prod(np.where(pattern, passes, 1 - passes), axis=1)
            accepted = rule.stays(mx.broadcast_to(mx.array(pattern), (count, width)))
            weights = np.array(correction_weights(p_mx, q_mx, scale, mx.minimum(accepted, depths), depths))
            for row, (cycle, stay) in enumerate(zip(cycles, np.array(accepted).tolist(), strict=True)):
                if chances[row] == 0:
                    continue
                assert stay <= cycle.depth, "padding passed"
                law = weights[row] / weights[row].sum()
                for token in np.flatnonzero(law):
                    tokens = (*cycle.drafts[:stay], int(token))
                    chance = cycle.probability * float(chances[row] * law[token])
                    cycle.outcomes.append((chance, stay, tokens))


def joint_law(
    rule: RejectionRule,
    p: Table,
    q: Table,
    plan: Callable[[Tokens, int, int], list[Cycle]],
    vocabulary: int,
    tokens: int,
    pad: int = 0,
) -> Floats:
    """Joint law of the first `tokens` tokens that cycles emit, [V] * tokens.

    Args:
        plan: context, memory and tokens that remain -> the cycles that may follow, their probabilities summing to 1.
            The memory is 0 at first, and then 1 + the number of drafts that the last cycle accepted.
    """
    law = np.zeros((vocabulary,) * tokens)
    states: dict[tuple[Tokens, int], float] = {((), 0): 1.0}
    for done in range(tokens):
        now = {key: mass for key, mass in states.items() if len(key[0]) == done}
        batch = []
        for (context, memory), mass in now.items():
            for cycle in plan(context, memory, tokens - done):
                cycle.probability *= mass
                batch.append(cycle)
            del states[context, memory]
        if not batch:
            continue
        emissions(rule, batch, p, q, vocabulary, pad)
        for cycle in batch:
            for chance, accepted, emitted in cycle.outcomes:
                sequence = cycle.context + emitted
                if len(sequence) >= tokens:
                    law[sequence[:tokens]] += chance
                else:
                    key = (sequence, 1 + accepted)
                    states[key] = states.get(key, 0.0) + chance
    return law
