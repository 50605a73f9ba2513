"""Guards claim 1 of the design: the emitted tokens follow p exactly, whatever is drafted.

The joint law of five tokens (hence of the first four) is enumerated in float64 over a vocabulary of three, with the
functions the engine uses: passing probabilities, what stays for each pattern of passes, the law of the token that
follows. Nothing is sampled, so there are no false alarms. Rules that facts.md calls biased are built here from the same
parts and must fail the same check; if they passed, the check would be blind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.engine.accept import RULES, RejectionRule, coupled
from tests.support.laws import Cycle, Floats, Table, Tokens, joint_law, total_variation, true_law

V = 3
TOKENS = 5
EXACT = 1e-9
BIASED = 1e-3

Plan = Callable[[Tokens, int, int], list[Cycle]]

rules = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
depths = pytest.mark.parametrize("depth", [1, 2, 3, 4])


def table(seed: int, change: Callable[[Floats, Tokens], Floats] | None = None) -> Table:
    """A random law for every context."""
    random = np.random.default_rng(seed)
    laws: dict[Tokens, Floats] = {}
    for length in range(7):  # the longest context: two tokens emitted, and a window of depth 4
        for context in itertools.product(range(V), repeat=length):
            law = random.dirichlet(np.full(V, 0.8))
            laws[context] = change(law, context) if change else law
    return laws.__getitem__


def top_2(law: Floats, context: Tokens) -> Floats:
    kept = np.where(law >= np.sort(law)[-2], law, 0)
    law = kept / kept.sum()
    return law


def certain(token: int) -> Floats:
    law = np.zeros(V)
    law[token] = 1
    return law


def one_hot(law: Floats, context: Tokens) -> Floats:
    return certain(int(law.argmax()))


def first_and_second(law: Floats, context: Tokens) -> Floats:
    kept = np.array([law[0] + 0.1, law[1], 0])
    law = kept / kept.sum()
    return law


def only_third(law: Floats, context: Tokens) -> Floats:
    return certain(2)


def tail_one_hot(law: Floats, context: Tokens) -> Floats:
    """Sampled drafts, then an n-gram's certain ones."""
    return law if len(context) % 3 < 2 else one_hot(law, context)


def pairs() -> dict[str, tuple[Table, Table]]:
    """p and q by the trouble they can make."""
    return {
        "random-1": (table(1), table(101)),
        "random-2": (table(2), table(102)),
        "random-3": (table(3), table(103)),
        "zeros in p": (table(4, top_2), table(104)),
        "zeros in q": (table(5), table(105, top_2)),
        "zeros in both": (table(6, top_2), table(106, top_2)),
        "equal": (table(7), table(7)),
        "equal with zeros": (table(8, top_2), table(8, top_2)),
        "equal at times": (table(9), lambda c: table_9(c) if len(c) % 2 else table_109(c)),
        "disjoint": (table(10, first_and_second), table(110, only_third)),
        "p one-hot": (table(11, one_hot), table(111)),
        "q one-hot": (table(12), table(112, one_hot)),
        "sampled, then one-hot": (table(13), table(113, tail_one_hot)),
    }


table_9, table_109 = table(9), table(109)
PAIRS = pairs()
laws = pytest.mark.parametrize("name", PAIRS)


def drafted(q: Table, context: Tokens, depth: int) -> list[tuple[Tokens, float]]:
    """Every draft sequence of a depth, with its probability; those that cannot be drafted are left out."""
    found: list[tuple[Tokens, float]] = [((), 1.0)]
    for _ in range(depth):
        found = [
            ((*drafts, token), chance * float(q(context + drafts)[token]))
            for drafts, chance in found
            for token in range(V)
            if q(context + drafts)[token] > 0
        ]
    return found


def fixed(q: Table, depth: Callable[[Tokens, int], int], *, truncate: bool = True) -> Plan:
    """Depth by what was emitted and by what the last cycle did, cut to the tokens that remain as the engine cuts it."""

    def plan(context: Tokens, memory: int, remaining: int) -> list[Cycle]:
        wanted = depth(context, memory)
        k = max(min(wanted, remaining - 1), 0) if truncate else wanted
        return [Cycle(context, drafts, chance, k) for drafts, chance in drafted(q, context, k)]

    return plan


def distance(rule: RejectionRule, p: Table, q: Table, plan: Plan, pad: int = 0, tokens: int = TOKENS) -> float:
    found = joint_law(rule, p, q, plan, V, tokens, pad)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    return total_variation(found, true_law(p, V, tokens))


@rules
@depths
@laws
def test_joint_law_is_exact(rule: RejectionRule, depth: int, name: str) -> None:
    p, q = PAIRS[name]
    assert distance(rule, p, q, fixed(q, lambda context, memory: depth)) < EXACT


@rules
@pytest.mark.parametrize("name", ["random-1", "zeros in both", "sampled, then one-hot"])
def test_a_window_past_the_last_token_does_not_bend_the_law(rule: RejectionRule, name: str) -> None:
    """Not cut at the end: three tokens are looked at while cycles go on in depth 4."""
    p, q = PAIRS[name]
    assert distance(rule, p, q, fixed(q, lambda context, memory: 4, truncate=False), tokens=3) < EXACT


@rules
@pytest.mark.parametrize("name", ["random-1", "zeros in p", "zeros in q", "equal"])
def test_rows_of_different_depth_in_one_padded_batch(rule: RejectionRule, name: str) -> None:
    """The batch holds all contexts of a length, depth 0 included, padded past the deepest with laws that hurt."""
    p, q = PAIRS[name]
    plan = fixed(q, lambda context, memory: (sum(context) + len(context)) % 4)
    assert distance(rule, p, q, plan, pad=2) < EXACT


@rules
@laws
def test_depth_may_follow_from_the_past(rule: RejectionRule, name: str) -> None:
    """As adaptive depth does it: by the tokens and by how many drafts the last cycle kept."""
    p, q = PAIRS[name]
    assert (
        distance(rule, p, q, fixed(q, lambda context, memory: (2 * memory + len(context) + sum(context)) % 5)) < EXACT
    )


def early_stop(q: Table, depth: int, after: Callable[[Floats, int | None], bool]) -> Plan:
    """Draft up to `depth` tokens; `after(law, token)` ends the drafting.

    It is asked before each draft with the law it would be drawn from and None, and after each with the token.
    """

    def plan(context: Tokens, memory: int, remaining: int) -> list[Cycle]:
        cycles: list[Cycle] = []
        growing: list[tuple[Tokens, float]] = [((), 1.0)]
        while growing:
            drafts, chance = growing.pop()
            law = q(context + drafts)
            weak = bool(drafts) and after(q(context + drafts[:-1]), drafts[-1])
            if len(drafts) >= min(depth, remaining - 1) or weak or after(law, None):
                cycles.append(Cycle(context, drafts, chance, len(drafts)))
                continue
            growing += [((*drafts, t), chance * float(law[t])) for t in range(V) if law[t] > 0]
        return cycles

    return plan


@rules
@pytest.mark.parametrize("name", ["random-1", "random-2", "random-3", "zeros in both"])
@pytest.mark.parametrize("how", ["max", "entropy", "weak draft, still verified"])
def test_exact_ways_to_stop_drafting_early(rule: RejectionRule, name: str, how: str) -> None:
    p, q = PAIRS[name]
    ends: dict[str, Callable[[Floats, int | None], bool]] = {
        "max": lambda law, token: token is None and bool(law.max() < 0.6),
        "entropy": lambda law, token: token is None and bool(-(law[law > 0] * np.log(law[law > 0])).sum() > 0.8),
        "weak draft, still verified": lambda law, token: token is not None and bool(law[token] < 0.3),
    }
    assert distance(rule, p, q, early_stop(q, 4, ends[how])) < EXACT


@rules
@pytest.mark.parametrize("name", ["random-1", "random-2", "random-3"])
def test_dropping_a_weak_draft_is_biased(rule: RejectionRule, name: str) -> None:
    """The newest draft is thrown away because its own q is small."""
    p, q = PAIRS[name]

    def plan(context: Tokens, memory: int, remaining: int) -> list[Cycle]:
        k = max(min(3, remaining - 1), 0)
        cycles = []
        for drafts, chance in drafted(q, context, k):
            weak = k > 0 and bool(q(context + drafts[:-1])[drafts[-1]] < 0.3)
            cycles.append(Cycle(context, drafts, chance, k - int(weak)))
        return cycles

    assert distance(rule, p, q, plan) > BIASED


@rules
@pytest.mark.parametrize("name", ["random-1", "random-2", "random-3"])
def test_cutting_the_window_at_a_weak_draft_is_biased(rule: RejectionRule, name: str) -> None:
    p, q = PAIRS[name]

    def plan(context: Tokens, memory: int, remaining: int) -> list[Cycle]:
        k = max(min(3, remaining - 1), 0)
        cycles = []
        for drafts, chance in drafted(q, context, k):
            weak = [i for i in range(k) if q(context + drafts[:i])[drafts[i]] < 0.3]
            cycles.append(Cycle(context, drafts, chance, weak[0] if weak else k))
        return cycles

    assert distance(rule, p, q, plan) > BIASED


@rules
@pytest.mark.parametrize("name", ["random-1", "random-2", "random-3"])
@pytest.mark.parametrize("ratio", ["truncated", "full"])
def test_a_truncated_draft_needs_its_own_law_in_the_ratio(rule: RejectionRule, name: str, ratio: str) -> None:
    """Drafts from the two best tokens of q: exact with that law in the ratio, biased with q itself."""
    p, full = PAIRS[name]

    def truncated(context: Tokens) -> Floats:
        return top_2(full(context), context)

    def plan(context: Tokens, memory: int, remaining: int) -> list[Cycle]:
        k = max(min(3, remaining - 1), 0)
        cycles = []
        for drafts, chance in drafted(truncated, context, k):
            given = [full(context + drafts[:i]) for i in range(k)] if ratio == "full" else None
            cycles.append(Cycle(context, drafts, chance, k, ratio_laws=given))
        return cycles

    found = distance(rule, p, truncated, plan)
    assert found < EXACT if ratio == "truncated" else found > BIASED


GRID = 6  # noise values an index may have; the laws are multiples of a sixth


def on_grid(seed: int) -> Table:
    random = np.random.default_rng(seed)
    cuts: dict[Tokens, Floats] = {}
    for length in range(5):
        for context in itertools.product(range(V), repeat=length):
            cuts[context] = random.multinomial(GRID, random.dirichlet(np.ones(V))) / GRID
    return cuts.__getitem__


def chosen(law: Floats, noise: int) -> int:
    """Inverse CDF: the same noise gives head and trunk the same token as far as their laws agree."""
    return int(np.searchsorted(np.cumsum(law * GRID), noise + 0.5))


@depths
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_coupled_acceptance_repeats_plain_decoding(depth: int, seed: int) -> None:
    """All 6^4 noise tables at once, one a row, each at its own length and depth.

    What is emitted equals what plain decoding chooses with the same noise, index by index; and since the laws are
    multiples of a sixth, the share of tables that give a sequence is its probability.
    """
    tokens = 4
    p, q = on_grid(seed), on_grid(100 + seed)
    noises = list(itertools.product(range(GRID), repeat=tokens))
    plain: list[Tokens] = []
    for noise in noises:
        sequence: Tokens = ()
        for index in range(tokens):
            sequence += (chosen(p(sequence), noise[index]),)
        plain.append(sequence)

    emitted: list[Tokens] = [()] * len(noises)
    cycles = 0
    while running := [i for i, sequence in enumerate(emitted) if len(sequence) < tokens]:
        cycles += 1
        row_depths, all_drafts, all_choices = [], [], []
        for i in running:
            context = emitted[i]
            k = min(1 + (depth + sum(context)) % depth, tokens - len(context) - 1)
            drafts: Tokens = ()
            while len(drafts) < k:
                drafts += (chosen(q(context + drafts), noises[i][len(context) + len(drafts)]),)
            choices = [chosen(p(context + drafts[:j]), noises[i][len(context) + j]) for j in range(k + 1)]
            row_depths.append(k)
            # Padding that agrees with its choice: it must not be counted.
            all_drafts.append([*drafts, *[0] * (depth - k)])
            all_choices.append([*choices, *[0] * (depth - k)])
        accepted, following = coupled(mx.array(all_choices), mx.array(all_drafts), mx.array(row_depths))
        kept: list[int] = np.array(accepted).tolist()
        after: list[int] = np.array(following).tolist()
        for row, i in enumerate(running):
            emitted[i] += (*all_drafts[row][: kept[row]], after[row])

    assert emitted == plain
    assert cycles > 1
    law = np.zeros((V,) * tokens)
    for sequence in emitted:
        law[sequence] += 1 / len(noises)
    assert total_variation(law, true_law(p, V, tokens)) < EXACT
