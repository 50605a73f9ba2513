"""Guards acceptance on the device: it decides as `engine.accept.rejection` does, corner by corner; what it emits has
the law of the model; a row hangs on its own numbers alone.

The text that GPUs run is run on the host, with slices of 64 or 128 ids. Decisions are compared with fp64 where none is
within 1e-3 of a border, corners with the engine's fp32.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from selfdraft.engine.accept import RULES, RejectionRule, correction_weights, rejection
from selfdraft.kernels import acceptance as subject
from selfdraft.kernels.acceptance import MOST, accept_rejection, accept_rejection_reference, fits
from selfdraft.kernels.draw import gumbel_reference
from selfdraft.kernels.portable import Kernel, Launch
from tests.support.chi_square import against_law
from tests.support.host_kernels import kernels_on_host, needs_compiler, run_on_host
from tests.support.laws import Cycle, Floats, Tokens, emissions

CLEAR = 1e-3
SIGNIFICANCE = 1e-4
V = 300

rules = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_THREADS", 64)
    monkeypatch.setattr(subject, "_PAIRS", 1)
    kernels_on_host(monkeypatch)


def decide(rule: RejectionRule, given: Sequence[mx.array]) -> list[tuple[int, int]]:
    """Drafts that stay and the token that follows, of each row, by the kernels."""
    z_p, z_q, *rest = given
    accepted, following = accept_rejection(z_p, z_q, *rest, block=rule.name == "block")
    assert (accepted.dtype, following.dtype) == (mx.int32, mx.uint32)
    return list(zip(np.array(accepted).tolist(), np.array(following).tolist(), strict=True))


def by_engine(rule: RejectionRule, given: Sequence[mx.array], dtype: mx.Dtype) -> list[tuple[int, int] | None]:
    """The same by the engine's function; None where a decision is close."""
    rows, positions, size = given[0].shape
    with mx.stream(mx.cpu):
        p, q = (mx.softmax(z.astype(dtype), axis=-1) for z in given[:2])
        drafts, depths, uniforms, keys = (x[:rows] for x in given[2:])
        drafts, uniforms = drafts[:, : positions - 1], uniforms[:, : positions - 1]
        noise = gumbel_reference(keys, size)
        accepted, following = rejection(rule, p, q, drafts, depths, uniforms.astype(dtype), noise.astype(dtype))
        passing, scale = rule.pass_probabilities(p, q, drafts, depths)
        best = mx.sort(mx.log(correction_weights(p, q, scale, accepted, depths)) + noise, axis=-1)
        close = (mx.abs(passing - uniforms) < CLEAR).any(axis=1)
        if size > 1:
            close = close | (best[:, -1] - best[:, -2] < CLEAR)
        found = zip(np.array(accepted).tolist(), np.array(following).tolist(), np.array(close).tolist(), strict=True)
        return [None if hangs else (stay, token) for stay, token, hangs in found]


def logits(laws: npt.ArrayLike) -> mx.array:
    with np.errstate(divide="ignore"):
        return mx.array(np.log(np.array(laws, dtype=np.float64)).astype(np.float32))


def few_logits(logits: mx.array, seed: int) -> mx.array:
    """As after top-k, of p and q each its own."""
    kept = mx.random.uniform(shape=logits.shape, key=mx.random.key(seed)) < 0.1
    return mx.where(kept | (logits == logits.max(axis=-1, keepdims=True)), logits, -mx.inf)


def cases(size: int, rows: int, most: int, seed: int) -> list[mx.array]:
    """Those of the self-check; of half the rows p and q have supports of their own."""
    z_p, z_q, _, *rest = subject._cases(size, rows, most, seed)
    own = (mx.arange(rows) % 4 == 1)[:, None, None]
    z_p, z_q = mx.where(own, few_logits(z_p, seed), z_p), mx.where(own, few_logits(z_q, seed + 1), z_q)
    drafts = mx.argmax(z_q + mx.random.gumbel(z_q.shape, key=mx.random.key(seed)), axis=-1)
    return [z_p, z_q, drafts, *rest]


@needs_compiler
@rules
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("size", "most"), [(V, 4), (V + 1, 1), (2, 2), (1, 3), (128, MOST)])
def test_decisions_are_those_of_the_engine(rule: RejectionRule, size: int, most: int) -> None:
    given = cases(size, 8 * (most + 1) if most < MOST else 8, most, size + most)
    found, expected = decide(rule, given), by_engine(rule, given, mx.float64)
    compared = [(ours, theirs) for ours, theirs in zip(found, expected, strict=True) if theirs]
    assert len(compared) > 0.8 * len(found)
    assert all(ours == theirs for ours, theirs in compared)
    if size == V:
        assert {stay for stay, _ in found} == set(range(most + 1))
        reference = accept_rejection_reference(*given, block=rule.name == "block")
        pairs = zip(*(np.array(x).tolist() for x in reference), strict=True)
        assert all(theirs in (None, pair) for theirs, pair in zip(expected, pairs, strict=True))


@needs_compiler
@rules
@pytest.mark.usefixtures("small_slices")
def test_corners(rule: RejectionRule) -> None:
    """Each as the engine's fp32 has it: which decision it is stands beside it."""
    even, only_0, only_1 = [0.25] * 4, [1.0, 0, 0, 0], [0.0, 1, 0, 0]
    skewed = [0.5, 0.25, 0.125, 0.125]
    corners: list[tuple[list[list[float]], list[list[float]], list[int], int, list[float], int | None]] = [
        ([even, skewed, only_1], [even, skewed], [0, 1], 2, [0.999999, 0.999999], 2),  # equal laws: all pass
        ([even, skewed, only_1], [even, skewed], [0, 1], 2, [1.0, 1.0], 0),  # but not at 1, with nothing left over
        ([only_1, only_1, only_1], [only_0, only_0], [0, 0], 2, [0.0, 0.0], 0),  # 0 does not pass the impossible
        ([only_0, only_1, even], [only_0, only_0], [0, 0], 2, [0.0, 0.0], 1),  # impossible at the last draft
        ([even, only_0, only_1], [even, only_1], [2, 1], 0, [0.0, 0.0], 0),  # depth 0: all behind is padding
        ([even, only_0, only_1], [even, only_1], [2, 1], 1, [0.5, 0.0], 1),  # depth 1: the bonus comes from p_2
        ([only_0, even, even], [only_1, even], [0, 0], 2, [0.5, 0.5], None),  # q = 0 at a draft: 1 / 0
        ([only_1, even, even], [only_1, even], [0, 0], 2, [0.5, 0.5], None),  # 0 / 0
    ]
    columns = list(zip(*corners, strict=True))
    for seed in range(3):
        given = [logits(columns[0]), logits(columns[1]), mx.array(list(columns[2]), mx.uint32)]
        given += [mx.array(list(columns[3]), mx.int32), mx.array(list(columns[4]), mx.float32)]
        given.append(mx.random.split(mx.random.key(seed), len(corners)))
        found = decide(rule, given)
        with mx.stream(mx.cpu):
            p, q = (mx.softmax(z, axis=-1) for z in given[:2])
            drafts, depths, uniforms, keys = given[2:]
            expected = rejection(rule, p, q, drafts, depths, uniforms, gumbel_reference(keys, 4))
        assert found == list(zip(*(np.array(x).tolist() for x in expected), strict=True))
        for (stay, _), corner in zip(found, corners, strict=True):
            assert corner[5] in (None, stay)


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_nothing_left_over_of_equal_laws() -> None:
    """A residual of rounding would be a law of noise: rejected everywhere, each row's token is that of p alone."""
    z = 2 * mx.random.normal((12, 2, V), key=mx.random.key(3))
    keys = mx.random.split(mx.random.key(4), 12)
    given = [z, z[:, :1], mx.zeros((12, 1), mx.uint32), mx.ones((12,), mx.int32), mx.full((12, 1), 1.0), keys]
    expected = mx.argmax(z[:, 0] + gumbel_reference(keys, V), axis=-1)
    for rule in RULES.values():
        assert decide(rule, given) == [(0, token) for token in np.array(expected).tolist()]


@needs_compiler
@rules
@pytest.mark.usefixtures("small_slices")
def test_each_draft_passes_exactly_below_its_probability(rule: RejectionRule) -> None:
    """Uniforms 1e-5 below and above the probabilities in fp64, which `test_joint_law.py` proves to be right.

    Drafts before the one that is tried pass if they can, those behind do not.
    """
    rows, most = 16, 4
    given = cases(V, rows, most, 31)
    with mx.stream(mx.cpu):
        p, q = (mx.softmax(z.astype(mx.float64), axis=-1) for z in given[:2])
        exact = np.array(rule.pass_probabilities(p, q, given[2], given[3][:rows])[0])
    between = (exact > 1e-4) & (exact < 1 - 1e-4)
    assert between.sum() > rows
    for place in range(most):
        kept = []
        for side in (-1e-5, 1e-5):
            uniforms = np.full((rows, most), 2.0)
            uniforms[:, :place], uniforms[:, place] = 0, exact[:, place] + side
            found = decide(rule, [*given[:4], mx.array(uniforms.astype(np.float32)), given[5]])
            kept.append(np.array([stay for stay, _ in found]))
        tried = between[:, place] & (exact[:, :place] > 0).all(axis=1)
        assert tried.any()
        assert (kept[0][tried] == place + 1).all()
        assert (kept[1][tried] <= place).all()


@needs_compiler
@rules
@pytest.mark.usefixtures("small_slices")
def test_a_row_hangs_on_its_own_numbers_alone(rule: RejectionRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, beside others, padded to another K, with anything behind its depth: what is chosen has the same bits."""
    chosen: list[npt.NDArray[np.float32]] = []

    def run(kernel: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        found = run_on_host(kernel, inputs, launch)
        if kernel.name == "acceptance_choice":
            chosen.append(np.array(found[0]))
        return found

    kernels_on_host(monkeypatch, run)
    given = cases(V, 8, 3, 5)
    given[3] = depths = mx.array([3, 0, 1, 2, 3, 1, 2, 0, 9, 9], mx.int32)
    decide(rule, given)
    together = chosen.pop()
    assert np.isfinite(together).all()
    wide = [mx.pad(x, [(0, 0), (0, 2), (0, 0)], constant_values=mx.nan) for x in given[:2]]
    wide += [mx.pad(given[2], [(0, 0), (0, 2)], constant_values=V + 10**6), depths]
    wide += [mx.pad(given[4], [(0, 0), (0, 2)], constant_values=mx.nan), given[5]]
    for row, depth in enumerate(np.array(depths)[:8].tolist()):
        wide[0][row, depth + 1 :], wide[1][row, depth:] = mx.nan, mx.nan
    decide(rule, wide)
    assert chosen.pop().tobytes() == together.tobytes()
    for row in (0, 1, 3, 5):
        decide(rule, [x[row : row + 1] for x in given])
        assert chosen.pop().tobytes() == together[row].tobytes()
        depth = max(np.array(depths)[row].item(), 1)
        decide(rule, [given[0][row:, : depth + 1], given[1][row:, :depth], *(x[row:] for x in given[2:])])
        assert chosen.pop()[0].tobytes() == together[row].tobytes()


class Laws:
    """p and q of the next token, given how many tokens went before and the last of them; some are impossible."""

    V, DEPTH = 4, 3

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.p, self.q = (random.dirichlet(np.ones(self.V), (self.DEPTH + 1, self.V)) for _ in range(2))
        for laws in (self.p[1:], self.q[:2]):
            laws[laws == laws.min(axis=-1, keepdims=True)] = 0
            laws /= laws.sum(axis=-1, keepdims=True)

    def p_of(self, context: Tokens) -> Floats:
        return np.asarray(self.p[len(context), context[-1] if context else 0])

    def q_of(self, context: Tokens) -> Floats:
        return np.asarray(self.q[len(context), context[-1] if context else 0])

    def emitted(self, rule: RejectionRule, depth: int) -> dict[Hashable, float]:
        """Exact law of what one cycle emits."""
        cycles = []
        for drafts in itertools.product(range(self.V), repeat=depth):
            chance = float(np.prod([self.q_of(drafts[:i])[drafts[i]] for i in range(depth)]))
            if chance > 0:
                cycles.append(Cycle((), drafts, chance, depth))
        emissions(rule, cycles, self.p_of, self.q_of, self.V)
        law: dict[Hashable, float] = {}
        for cycle in cycles:
            for chance, _, tokens in cycle.outcomes:
                law[tokens] = law.get(tokens, 0.0) + chance
        return law


ROWS = 1500


def sample(rule: RejectionRule, laws: Laws, rows: int, seed: int) -> list[Tokens]:
    """What one cycle emits on many rows, drafts, uniforms and noise drawn by MLX."""
    keys = mx.random.split(mx.random.key(seed), laws.DEPTH + 2)
    p_table, q_table = logits(laws.p), logits(laws.q)
    last = mx.zeros((rows,), mx.uint32)
    z_p, z_q, drafts = [p_table[0, last]], [], []
    for i in range(laws.DEPTH):
        z_q.append(q_table[i, last])
        last = mx.argmax(z_q[-1] + mx.random.gumbel((rows, laws.V), key=keys[i]), axis=-1)
        drafts.append(last)
        z_p.append(p_table[i + 1, last])
    tokens, uniforms = mx.stack(drafts, axis=1), mx.random.uniform(shape=(rows, laws.DEPTH), key=keys[-1])
    stack = [mx.stack(each, axis=1) for each in (z_p, z_q)]
    given = [*stack, tokens, mx.full((rows,), laws.DEPTH, mx.int32), uniforms, mx.random.split(keys[-2], rows)]
    drafted = np.array(tokens).tolist()
    return [(*drafted[row][:stay], token) for row, (stay, token) in enumerate(decide(rule, given))]


@needs_compiler
@rules
def test_what_is_emitted_has_the_law_of_the_model(rule: RejectionRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of 1,500 rows at a fixed seed: two p-values, of 1e-4 or less once in 10,000 seeds.

    Corrections drawn from p are found with a power of 1.00, probabilities too small by a tenth with 0.13 (token-wise)
    and 0.003 only: those are guarded above, against fp64.
    """
    monkeypatch.setattr(subject, "_THREADS", 32)
    monkeypatch.setattr(subject, "_PAIRS", 1)
    kernels_on_host(monkeypatch)
    laws = Laws(1)
    emitted = sample(rule, laws, ROWS, seed=10)
    assert {len(tokens) for tokens in emitted} == {1, 2, 3, 4}
    assert against_law(Counter(emitted), laws.emitted(rule, laws.DEPTH)) > SIGNIFICANCE
    assert against_law(Counter(tokens[0] for tokens in emitted), dict(enumerate(laws.p_of(())))) > SIGNIFICANCE


@needs_compiler
@pytest.mark.usefixtures("small_slices")
def test_the_check_finds_a_rule_that_is_not_the_asked_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert subject._check_error(130, 40) == 0
    monkeypatch.setattr(subject, "accept_rejection", lambda *given, block: accept_rejection(*given, block=not block))
    assert subject._check_error(130, 40) > 0.05


@needs_compiler
def test_whole_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device launches them: three of 4,096 ids."""
    kernels_on_host(monkeypatch)
    given = cases(9001, 4, 3, 2)
    for rule in RULES.values():
        expected = by_engine(rule, given, mx.float64)
        assert sum(theirs is not None for theirs in expected) >= 3
        assert all(theirs in (None, ours) for ours, theirs in zip(decide(rule, given), expected, strict=True))


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_host(monkeypatch)
    assert fits(1, 248_320)
    assert fits(MOST, 8)
    assert not any((fits(0, 8), fits(MOST + 1, 8), fits(1, 1 << 24)))
    given = cases(8, 2, 2, 0)
    wrong = {0: given[0][:, :2], 1: given[1][:1], 2: given[2][:, :1], 3: given[3][:1], 4: given[4][:1], 5: given[5][:1]}
    dtypes = {2: mx.int32, 3: mx.uint32, 1: mx.bfloat16, 5: mx.int32}
    wrong_sets = [[*given[:i], x, *given[i + 1 :]] for i, x in wrong.items()]
    wrong_sets += [[*given[:i], given[i].astype(dtype), *given[i + 1 :]] for i, dtype in dtypes.items()]
    wrong_sets += [[given[0][:, :1], given[1][:, :0], *given[2:]], [given[0][0], *given[1:]]]
    for each in wrong_sets:
        with pytest.raises(ValueError, match="accept_rejection"):
            accept_rejection(*each, block=True)
