"""Guards the choice of depth: it starts at the deepest, settles where tokens per second are most, and looks back.

A choice that looked at the draws it is about to make would bias the output; one that never went back would keep a bad
start for ever. Synthetic acceptances and costs, fixed seeds.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfdraft.engine import Engine
from selfdraft.engine.depth import AdaptiveDepth, CostModel, FixedDepth, expected_tokens
from tests.support.nano import SMALLER, nano_model
from tests.support.rows import finish, request
from tests.support.scripted import ScriptedHead

DEEPEST = 5


def drive(
    policy: AdaptiveDepth, costs: CostModel, acceptance: list[float], seconds: list[float], cycles: int, seed: int = 0
) -> list[int]:
    """Run a policy against a world: conditional acceptances by position, seconds by depth. Returns its choices."""
    world = random.Random(seed)
    choices = []
    for _ in range(cycles):
        depth = policy.choose(1)
        choices.append(depth)
        accepted = 0
        while accepted < depth and world.random() < acceptance[accepted]:
            accepted += 1
        costs.observe(1, depth, seconds[depth])
        policy.observe(min(accepted + 1, depth), accepted)
    return choices


def best_depth(acceptance: list[float], seconds: list[float]) -> int:
    return max(range(DEEPEST + 1), key=lambda k: expected_tokens(acceptance, k) / seconds[k])


def linear(first: float, slope: float) -> list[float]:
    """Seconds by depth: plain decoding costs `first`, each draft `slope` more."""
    return [first + slope * depth for depth in range(DEEPEST + 1)]


WORLDS = {
    "deepest pays": ([0.97] * 5, linear(1.0, 0.05)),
    "middle pays": ([0.95, 0.9, 0.3, 0.1, 0.1], linear(1.0, 0.25)),
    "one pays": ([0.8, 0.1, 0.1, 0.1, 0.1], linear(1.0, 0.4)),
    "nothing pays": ([0.2, 0.1, 0.1, 0.1, 0.1], linear(1.0, 0.8)),
    "a step in the cost": ([0.9, 0.9, 0.9, 0.9, 0.9], [1.0, 1.1, 1.2, 2.6, 2.7, 2.8]),
}


def test_expected_tokens() -> None:
    assert expected_tokens([0.5, 0.5], 0) == 1
    assert expected_tokens([0.5, 0.4, 0.9], 2) == pytest.approx(1 + 0.5 + 0.2)
    rate = 0.7
    assert expected_tokens([rate] * 5, 5) == pytest.approx((1 - rate**6) / (1 - rate))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rates=st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_expected_tokens_is_the_mean_of_the_world(rates: list[float]) -> None:
    """Against the sum over all outcomes of a cycle."""
    total, alive = 0.0, 1.0
    for accepted in range(3):
        total += alive * (1 - rates[accepted]) * (accepted + 1)
        alive *= rates[accepted]
    assert expected_tokens(rates, 3) == pytest.approx(total + alive * 4)


@pytest.mark.parametrize("deepest", [1, 2, 5, 8])
def test_starts_at_the_deepest(deepest: int) -> None:
    assert AdaptiveDepth(deepest, CostModel()).choose(1) == deepest


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_settles_where_tokens_per_second_are_most(name: str, seed: int) -> None:
    """Within the gain that a switch must promise; averages over the recent past wander a little."""
    acceptance, seconds = WORLDS[name]
    costs = CostModel()
    choices = drive(AdaptiveDepth(DEEPEST, costs), costs, acceptance, seconds, 600, seed)
    settled = Counter(choices[200:]).most_common(1)[0][0]
    best = best_depth(acceptance, seconds)
    rates = [expected_tokens(acceptance, k) / seconds[k] for k in (settled, best)]
    assert rates[0] > 0.95 * rates[1], (settled, best)
    if name == "nothing pays":
        assert settled == 0


def test_depth_zero_is_left_again_when_the_text_becomes_easy() -> None:
    """While shallow it tries one deeper now and then, else it could never notice."""
    costs = CostModel()
    policy = AdaptiveDepth(DEEPEST, costs)
    seconds = linear(1.0, 0.2)
    hard = drive(policy, costs, [0.02] * 5, seconds, 400)
    assert Counter(hard[200:]).most_common(1)[0][0] == 0
    tries = [i for i, depth in enumerate(hard[200:]) if depth > 0]
    assert 2 <= len(tries) <= 10  # now and then, not always
    easy = drive(policy, costs, [0.99] * 5, seconds, 3000)
    assert Counter(easy[-500:]).most_common(1)[0][0] == DEEPEST


def test_a_small_promise_does_not_make_it_switch() -> None:
    """Two depths 1% apart: without hysteresis, noise in the figures would flip between them for ever."""
    costs = CostModel()
    policy = AdaptiveDepth(1, costs)
    for _ in range(200):  # every draft stays: two tokens a cycle at depth 1
        policy.observe(1, 1)

    def depth_1_takes(seconds: float) -> int:
        for _ in range(9):
            costs.observe(1, 0, 1.0)
            costs.observe(1, 1, seconds)
        return policy.choose(1)

    assert depth_1_takes(1.9) == 1
    assert depth_1_takes(2.02) == 1  # depth 0 is better, by 1%
    assert depth_1_takes(2.2) == 0  # by 10%
    assert depth_1_takes(1.98) == 0  # depth 1 is better, by 1%
    assert depth_1_takes(1.8) == 1


def test_costs_are_probed_before_they_are_compared() -> None:
    """Every anchor is measured a few times, plain decoding among them: without it nothing says that drafting pays."""
    costs = CostModel()
    choices = drive(AdaptiveDepth(DEEPEST, costs), costs, [0.9] * 5, linear(1.0, 0.1), 12)
    assert choices == [5, 5, 5, 2, 2, 2, 1, 1, 1, 0, 0, 0]


def test_probing_ends_beside_a_row_that_keeps_the_batch_deep() -> None:
    """A cycle costs what its deepest row makes it: beside a row fixed at 5, no cycle of depth 2 is ever measured.

    A row that waited for such a measurement stayed at the depth it was probing for as long as its neighbour ran.
    """
    costs = CostModel()
    policy = AdaptiveDepth(DEEPEST, costs)
    choices = []
    for _ in range(60):
        depth = policy.choose(2)
        choices.append(depth)
        costs.observe(2, max(depth, 5), 1.0)
        policy.observe(depth, depth)  # every draft stays
    assert choices[:12] == [5, 5, 5, 2, 2, 2, 1, 1, 1, 0, 0, 0]
    assert set(choices[12:]) == {DEEPEST}


def test_rows_share_what_cycles_cost() -> None:
    """A second row does not probe again, but has its own acceptance."""
    costs = CostModel()
    drive(AdaptiveDepth(DEEPEST, costs), costs, [0.9] * 5, linear(1.0, 0.05), 50)
    assert set(drive(AdaptiveDepth(DEEPEST, costs), costs, [0.97] * 5, linear(1.0, 0.05), 40)) == {DEEPEST}


def test_cost_model_interpolates_and_forgets() -> None:
    costs = CostModel()
    assert costs.seconds(1, 3) is None
    costs.observe(1, 0, 1.0)
    assert costs.seconds(1, 0) is None  # one depth says nothing about another
    costs.observe(1, 4, 3.0)
    assert costs.seconds(1, 2) == pytest.approx(2.0)
    assert costs.seconds(1, 6) == pytest.approx(4.0)
    assert costs.seconds(2, 2) is None  # another number of rows, another cost
    for _ in range(4):
        costs.observe(1, 4, 3.2)
    costs.observe(1, 4, 90.0)  # a hiccup
    assert costs.seconds(1, 4) == pytest.approx(3.2)
    for _ in range(9):
        costs.observe(1, 4, 5.0)  # a longer context
    assert costs.seconds(1, 4) == pytest.approx(5.0)
    costs.observe(3, 2, 1.0)
    costs.observe(3, 4, 0.1)
    assert (costs.seconds(3, 8) or 0) > 0  # never free, however it extrapolates


def test_choices_are_a_function_of_the_past() -> None:
    """Equal pasts, equal choices, whatever the world does next: nothing else enters."""
    world = random.Random(5)
    policies, costs = [], []
    for _ in range(2):
        costs.append(CostModel())
        policies.append(AdaptiveDepth(DEEPEST, costs[-1]))
    for _ in range(300):
        random.seed(world.random())  # global randomness is not looked at
        first = policies[0].choose(1)
        random.seed(world.random())
        assert policies[1].choose(1) == first
        accepted = world.randint(0, first)
        seconds = world.uniform(0.5, 1.5) + 0.2 * first
        for policy, cost in zip(policies, costs, strict=True):
            cost.observe(1, first, seconds)
            policy.observe(min(accepted + 1, first), accepted)


def test_fixed_depth_stays() -> None:
    policy = FixedDepth(3)
    policy.observe(3, 0)
    assert policy.choose(1) == policy.choose(7) == 3


def test_the_engine_measures_and_starts_at_the_deepest() -> None:
    model = ScriptedHead(nano_model(**SMALLER))
    engine = Engine(model)
    row = engine.add(request([1], depth="auto", max_tokens=80, temperature=0.0))
    finish(engine)
    widths = [width for _, width in model.forwards[1:]]
    assert widths[:12] == [9, 9, 9, 5, 5, 5, 2, 2, 2, 1, 1, 1]  # depth 8, 4, 1, 0
    assert all(engine.costs.samples(1, depth) >= 3 for depth in (8, 4, 1, 0))
    assert (engine.costs.seconds(1, 0) or 0) > 0
    assert engine.costs.samples(2, 0) == 0
    assert row.statistics.timings().emitted["plain"] >= 3
