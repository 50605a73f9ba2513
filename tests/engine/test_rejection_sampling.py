"""Guards `rejection`: in fp32, with the engine's own noise, it samples the law that the enumeration proves.

Chi-square against exact laws at fixed seeds: a run is deterministic, so there are no false alarms while the noise stays
as it is. If the noise changes, each p-value is new: 18 of them, each below 1e-4 with odds of 1 in 10,000.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.engine import noise
from selfdraft.engine.accept import RULES, RejectionRule, correction_weights, rejection
from tests.support.chi_square import against_law
from tests.support.laws import Cycle, Floats, Tokens, emissions

V = 4
DEPTH = 3
ROWS = 20_000
SIGNIFICANCE = 1e-4

rules = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


class Laws:
    """p and q of the next token, given how many tokens went before and the last of them."""

    def __init__(self, seed: int, *, sparse: bool = False) -> None:
        random = np.random.default_rng(seed)
        self.p, self.q = (random.dirichlet(np.ones(V), (DEPTH + 1, V)) for _ in range(2))
        if sparse:  # as after top-k
            for laws in (self.p, self.q):
                laws[laws < np.sort(laws, axis=-1)[..., -2:-1]] = 0
                laws /= laws.sum(axis=-1, keepdims=True)

    def p_of(self, context: Tokens) -> Floats:
        return np.asarray(self.p[len(context), context[-1] if context else 0])

    def q_of(self, context: Tokens) -> Floats:
        return np.asarray(self.q[len(context), context[-1] if context else 0])

    def emitted(self, rule: RejectionRule, depth: int) -> dict[Hashable, float]:
        """Exact law of what one cycle emits, and of its first tokens."""
        cycles = []
        for drafts in itertools.product(range(V), repeat=depth):
            chance = float(np.prod([self.q_of(drafts[:i])[drafts[i]] for i in range(depth)]))
            if chance > 0:
                cycles.append(Cycle((), drafts, chance, depth))
        emissions(rule, cycles, self.p_of, self.q_of, V)
        law: dict[Hashable, float] = {}
        for cycle in cycles:
            for chance, _, tokens in cycle.outcomes:
                law[tokens] = law.get(tokens, 0.0) + chance
        return law


def sample(rule: RejectionRule, laws: Laws, depths: list[int], seed: int) -> list[Tokens]:
    """What one cycle emits on many rows, drafts and acceptance drawn with the noise module."""
    rows = len(depths)
    streams = [noise.stream(seed, row) for row in range(rows)]
    keys, uniforms = noise.addresses(streams, [0] * rows, DEPTH)
    gumbel = noise.gumbel(keys, V)
    p_table, q_table = mx.array(laws.p, dtype=mx.float32), mx.array(laws.q, dtype=mx.float32)
    last = mx.zeros((rows,), dtype=mx.uint32)
    p, q, drafts = [p_table[0, last]], [], []
    for i in range(DEPTH):
        law = q_table[i, last]
        last = mx.argmax(mx.log(law) + gumbel[:, i], axis=-1)
        q.append(law)
        drafts.append(last)
        p.append(p_table[i + 1, last])
    tokens = mx.stack(drafts, axis=1)
    accepted, following = rejection(
        rule, mx.stack(p, axis=1), mx.stack(q, axis=1), tokens, mx.array(depths), uniforms, gumbel[:, -1]
    )
    drafted, kept, after = np.array(tokens).tolist(), np.array(accepted).tolist(), np.array(following).tolist()
    return [(*drafted[b][: kept[b]], after[b]) for b in range(rows)]


@rules
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_sampled_emissions_follow_the_exact_law(rule: RejectionRule, sparse: bool) -> None:
    laws = Laws(1, sparse=sparse)
    emitted = sample(rule, laws, [DEPTH] * ROWS, seed=10)
    assert {len(tokens) for tokens in emitted} == {1, 2, 3, 4}
    assert against_law(Counter(emitted), laws.emitted(rule, DEPTH)) > SIGNIFICANCE
    first = Counter(tokens[0] for tokens in emitted)
    assert against_law(first, dict(enumerate(laws.p_of(())))) > SIGNIFICANCE


@rules
def test_rows_of_different_depths_in_one_batch(rule: RejectionRule) -> None:
    laws = Laws(2)
    depths = [row % (DEPTH + 1) for row in range(ROWS)]
    emitted = sample(rule, laws, depths, seed=11)
    for depth in range(DEPTH + 1):
        mine = [tokens for tokens, d in zip(emitted, depths, strict=True) if d == depth]
        assert max(len(tokens) for tokens in mine) == depth + 1
        assert against_law(Counter(mine), laws.emitted(rule, depth)) > SIGNIFICANCE
    first = Counter(tokens[0] for tokens in emitted)
    assert against_law(first, dict(enumerate(laws.p_of(())))) > SIGNIFICANCE


@rules
def test_a_uniform_of_zero_does_not_accept_the_impossible(rule: RejectionRule) -> None:
    """u can be 0.0 and p(draft) 0: `u <= p/q` would emit a token that the filters excluded."""
    p = mx.array([[[0.0, 1, 0, 0]] * 4])
    q = mx.array([[[1.0, 0, 0, 0]] * 3])
    zeros = mx.zeros((1, 3), dtype=mx.uint32)
    accepted, following = rejection(rule, p, q, zeros, mx.array([3]), mx.zeros((1, 3)), mx.zeros((1, V)))
    assert (accepted.item(), following.item()) == (0, 1)
    # Possible at first, impossible at the last draft of the row.
    mixed = mx.array([[[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]])
    accepted, following = rejection(rule, mixed, q, zeros, mx.array([3]), mx.zeros((1, 3)), mx.zeros((1, V)))
    assert (accepted.item(), following.item()) == (2, 2)


@rules
def test_equal_laws_accept_everything(rule: RejectionRule) -> None:
    law = mx.broadcast_to(mx.array([0.25, 0.25, 0.5, 0]), (1, DEPTH + 1, V))
    almost_one = mx.full((1, DEPTH), 1 - 2**-24)
    drafts = mx.array([[2, 0, 1]])
    accepted, following = rejection(rule, law, law[:, :DEPTH], drafts, mx.array([DEPTH]), almost_one, mx.zeros((1, V)))
    assert (accepted.item(), following.item()) == (DEPTH, 2)


def test_an_empty_residual_falls_back_to_p() -> None:
    """Rounding can reject a draft where p equals q: dividing the empty residual by its sum would make NaN."""
    p = mx.array([[[0.5, 0.25, 0.25, 0], [0, 0, 0, 1]]])
    weights = correction_weights(p, p[:, :1], mx.ones((1, 2)), mx.array([0]), mx.array([1]))
    assert weights.tolist() == [[0.5, 0.25, 0.25, 0]]
    passes_never = mx.array([[1.0]])  # no uniform is 1, so this forces the rejection
    drafts = mx.array([[0]])
    picked = Counter(
        rejection(RULES["tokenwise"], p, p[:, :1], drafts, mx.array([1]), passes_never, favoured)[1].item()
        for favoured in (mx.eye(V)[i : i + 1] * 99 for i in range(V))
    )
    assert picked == {0: 2, 1: 1, 2: 1}  # the fourth token has p = 0: however favoured, it is not chosen


@rules
def test_depth_zero_draws_from_p(rule: RejectionRule) -> None:
    p = mx.array([[[0.0, 1, 0, 0]], [[0, 0, 0, 1]]])
    nothing = mx.zeros((2, 0), dtype=mx.uint32)
    accepted, following = rejection(rule, p, p[:, :0], nothing, mx.array([0, 0]), mx.zeros((2, 0)), mx.zeros((2, V)))
    assert accepted.tolist() == [0, 0]
    assert following.tolist() == [1, 3]
