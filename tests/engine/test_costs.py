"""Guards what cycles are taken to cost: one number of rows teaches another, and only where that can be trusted.

Costs learned anew at each number of rows took up to twelve probing cycles each, in the middle of other requests. A
prediction that is wrong and sure of itself would be worse than a probe: worlds that are not linear must be probed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from selfdraft.engine import DepthStart, Engine
from selfdraft.engine.costs import ENOUGH, CostModel
from selfdraft.engine.depth import AdaptiveDepth
from tests.support.nano import SMALLER, nano_model
from tests.support.rows import finish, request
from tests.support.scripted import ScriptedHead

World = Callable[[int, int], float]  # rows, depth -> seconds
ANCHORS = (8, 4, 1, 0)


def linear(rows: int, depth: int) -> float:
    """Fixed, per row, per token verified, per step of the head: in about the proportions of the reference model."""
    return 0.012 + 0.002 * rows + 0.004 * rows * (depth + 1) + 0.003 * depth


def tiles_of_8(rows: int, depth: int) -> float:
    """A device that works on eight tokens at once: flat, then a step."""
    return 0.010 * (-(-rows * (depth + 1) // 8)) ** 1.5


def learn(costs: CostModel, world: World, rows: int, depths: tuple[int, ...] = ANCHORS, noise: float = 0.0) -> None:
    chance = random.Random(rows)
    for depth in depths:
        for _ in range(ENOUGH):
            costs.observe(rows, depth, world(rows, depth) * (1 + chance.uniform(-noise, noise)))


def probes(costs: CostModel, world: World, rows: int, cycles: int = 40) -> int:
    """Cycles that a new row spends on depths other than the one it settles at."""
    policy = AdaptiveDepth(8, costs)
    choices = []
    for _ in range(cycles):
        depth = policy.choose(rows)
        choices.append(depth)
        costs.observe(rows, depth, world(rows, depth))
        policy.observe(depth, depth)
    return sum(depth != choices[-1] for depth in choices)


def test_one_number_of_rows_says_nothing_of_another() -> None:
    """Whether a row or the pass itself costs cannot be told apart: no guess."""
    costs = CostModel()
    learn(costs, linear, 1, tuple(range(9)))
    assert all(costs.seconds(2, depth) is None and not costs.knows(2, depth) for depth in ANCHORS)


@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_two_numbers_of_rows_tell_the_third(noise: float) -> None:
    costs = CostModel()
    learn(costs, linear, 1, noise=noise)
    learn(costs, linear, 2, noise=noise)
    for depth in range(9):
        assert costs.knows(3, depth)
        assert costs.seconds(3, depth) == pytest.approx(linear(3, depth), rel=0.02 + 2 * noise)


def test_far_away_is_uncertain_until_a_little_is_measured_there() -> None:
    costs = CostModel()
    learn(costs, linear, 1, noise=0.04)
    learn(costs, linear, 2, noise=0.04)
    assert not costs.knows(32, 8)
    learn(costs, linear, 32, (8,), noise=0.04)
    assert costs.knows(32, 4)
    assert not costs.knows(32, 0)  # the other end is measured, too
    assert costs.seconds(32, 4) == pytest.approx(linear(32, 4), rel=0.1)


def test_a_new_number_of_rows_is_not_probed_again() -> None:
    """Twelve cycles at one and at each further number of rows before; now at the first two, and none at the third."""
    costs = CostModel()
    learn(costs, linear, 1)
    assert probes(costs, linear, 2) <= 9
    assert max(probes(costs, linear, rows) for rows in (3, 4)) <= 3  # until it knows that every draft stays
    assert probes(CostModel(), linear, 3) >= 9  # what it takes without


def test_what_is_not_linear_is_probed() -> None:
    """The points lie off every line by far: no prediction is sure enough."""
    costs = CostModel()
    learn(costs, tiles_of_8, 1)
    learn(costs, tiles_of_8, 2)
    learn(costs, tiles_of_8, 3)
    assert not costs.knows(6, 8)
    assert not costs.knows(12, 0)


def test_measured_beats_told() -> None:
    """Three rows are slower than the others say: what is measured counts, and corrects its neighbours."""
    costs = CostModel()
    for rows in (1, 2, 4, 5):
        learn(costs, linear, rows)
    told = costs.seconds(3, 4)
    assert told == pytest.approx(linear(3, 4), rel=0.01)
    for _ in range(ENOUGH):
        costs.observe(3, 8, 1.2 * linear(3, 8))
    assert costs.seconds(3, 8) == pytest.approx(1.2 * linear(3, 8))
    assert costs.seconds(3, 4) == pytest.approx(1.2 * linear(3, 4), rel=0.05)


def test_the_first_cycle_of_a_shape_is_not_believed() -> None:
    """It may compile: ten times its cost would keep that depth from ever being chosen again."""
    costs = CostModel()
    learn(costs, linear, 1)
    before = costs.seconds(1, 3)
    costs.observe(1, 3, 10 * linear(1, 3))
    assert costs.seconds(1, 3) == before


def test_costs_move_with_the_newest_cycles() -> None:
    """Medians are kept between the questions of one cycle, no longer; so is the fit, for some cycles."""
    costs = CostModel()
    for rows in (1, 2, 4):
        learn(costs, linear, rows)
    assert costs.seconds(3, 4) == pytest.approx(linear(3, 4), rel=0.01)
    for rows in (1, 2, 4):
        for _ in range(3):
            learn(costs, lambda rows, depth: 2 * linear(rows, depth), rows)
    assert costs.seconds(2, 4) == pytest.approx(2 * linear(2, 4))
    assert costs.seconds(3, 4) == pytest.approx(2 * linear(3, 4), rel=0.01)


START = DepthStart(depth=2, seconds={depth: linear(1, depth) for depth in range(5)}, acceptance=(0.9, 0.8, 0.3, 0.2))


def test_a_tuned_start_is_where_it_begins() -> None:
    """No probe, and no deep cycle first: costs and acceptance are known, and deeper positions do no better."""
    costs = CostModel()
    costs.start(START.seconds)
    policy = AdaptiveDepth(8, costs, START)
    assert [policy.choose(1) for _ in range(5)] == [2] * 5
    assert max(AdaptiveDepth(8, costs, START).choose(2) for _ in range(5)) == 4  # as deep as was tuned, no deeper
    shallow = AdaptiveDepth(1, costs, START)
    assert shallow.choose(1) == 1


def test_a_tuned_start_is_kept_where_deeper_promises_next_to_nothing() -> None:
    """Begun at the deepest it would stay there: a switch needs a clear gain, in either direction."""
    start = DepthStart(2, dict.fromkeys(range(5), 1.0), (0.9, 0.8, 0.02, 0.02))
    costs = CostModel()
    costs.start(start.seconds)
    assert AdaptiveDepth(8, costs, start).choose(1) == 2


def test_a_tuned_start_is_only_a_start() -> None:
    """A machine that is slower at depth now, or a text that is harder, moves it."""
    costs = CostModel()
    costs.start(START.seconds)
    policy = AdaptiveDepth(8, costs, START)
    choices = []
    for _ in range(100):
        depth = policy.choose(1)
        choices.append(depth)
        costs.observe(1, depth, linear(1, depth))
        policy.observe(min(1, depth), 0)  # nothing is accepted any more
    assert choices[0] == 2
    assert choices[-1] == 0


def test_the_engine_hands_its_start_to_rows() -> None:
    model = ScriptedHead(nano_model(**SMALLER))
    engine = Engine(model, start=DepthStart(2, {0: 1.0, 1: 1.05, 2: 1.1, 3: 5.0}, (1.0, 1.0, 1.0)))
    engine.add(request([1], depth="auto", max_tokens=10, temperature=0.0))
    finish(engine)
    assert [width for _, width in model.forwards[1:3]] == [3, 3]  # depth 2 from the first cycle on
