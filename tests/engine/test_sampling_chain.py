"""Guards the law that tokens are drawn from: every step of the chain, their order, and the rows' independence.

`reference` is the chain written again, for one row, in numpy float64, straight from the semantics in `SamplingParams`.
Random logits and offsets are multiples of 1/8, so that ties are real ties; inputs whose verdict hangs on rounding (a
cumulative mass within 1e-5 of top_p and the like) are skipped. Examples are derived, not random: no false alarms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from selfdraft.engine.sampling import Chain, History
from selfdraft.kernels import kept_logits as subject
from selfdraft.kernels.portable import Kernel, Launch
from selfdraft.params import SamplingParams
from tests.support.host_kernels import kernels_on_host, needs_compiler, run_on_host
from tests.support.rows import params

V = 8
CLOSE = 1e-5

Floats = npt.NDArray[np.float64]
derived = partial(settings, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Case:
    """One row: its logits [P, V] and what it went through."""

    params: SamplingParams
    logits: Floats
    prompt: list[int]
    output: list[int]
    drafts: list[int]
    stops: list[int]


def reference(case: Case) -> Floats:
    """Filtered logits [P, V]: as many drafts as positions but one, or all drafts before a single position."""
    p, positions = case.params, len(case.logits)
    rows = []
    for position in range(positions):
        before = case.drafts[:position] if positions > 1 else case.drafts
        seen = case.output + before
        z = case.logits[position].copy()
        for token in range(V):
            if token in seen or token in case.prompt:
                penalty = p.repetition_penalty or 1.0
                z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
            z[token] -= (p.presence_penalty or 0.0) * (token in seen)
            z[token] -= (p.frequency_penalty or 0.0) * seen.count(token)
            z[token] += (p.logit_bias or {}).get(token, 0.0)
            if token in case.stops and len(seen) < p.min_tokens:
                z[token] = -np.inf
        rows.append(z if p.temperature == 0 else filtered(z / (p.temperature or 1.0), p))
    return np.stack(rows)


def filtered(z: Floats, p: SamplingParams) -> Floats:
    keep = np.isfinite(z)
    values = np.sort(z[keep])[::-1]
    assume(not np.any((np.diff(values) < 0) & (np.diff(values) > -CLOSE)))
    if p.top_k and p.top_k < len(values):
        keep &= z >= values[p.top_k - 1]
    law = np.where(keep, np.exp(z - z.max()), 0)
    law /= law.sum()
    if p.top_p is not None and p.top_p < 1:
        order = np.argsort(-law, kind="stable")
        before = np.cumsum(law[order]) - law[order]
        assume(not np.any(np.abs(before - p.top_p) < CLOSE))
        keep &= law >= law[order][before < p.top_p].min()
    if p.min_p:
        share = law / law.max()
        assume(not np.any((np.abs(share - p.min_p) < CLOSE) & (share < 1)))
        keep &= share >= p.min_p
    return np.where(keep, z, -np.inf)


def chain(cases: Sequence[Case]) -> list[Floats]:
    """The production chain on a batch; all cases have the same shapes."""
    made = Chain([case.params for case in cases], [case.stops for case in cases], V)
    histories: list[History | None] = []
    for case in cases:
        p = case.params
        penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        history = History(case.prompt, V) if penalised else None
        if history is not None:
            history.emit(case.output)
        histories.append(history)
    drafts = mx.array([case.drafts for case in cases], dtype=mx.uint32) if cases[0].drafts else None
    logits = np.stack([case.logits for case in cases])
    out, flaws = made(
        mx.array(logits.astype(np.float32)),
        [len(case.output) for case in cases],
        histories,
        drafts,
    )
    assert out.dtype == mx.float32
    assert np.array_equal(np.array(flaws), np.isneginf(logits).any(axis=-1))  # whatever the chain takes away
    return list(np.array(out))


def check(case: Case) -> None:
    expected, found = reference(case), chain([case])[0]
    assert np.array_equal(np.isfinite(found), np.isfinite(expected)), "another support"
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


eighths = st.integers(-32, 32).map(lambda n: n / 8)
tokens = st.integers(0, V - 1)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.25, 0.6, 0.9, 1.5, 4.0]),
    "top_k": st.integers(1, V + 2),
    "top_p": st.floats(0.01, 1).map(lambda x: round(x, 3)),
    "min_p": st.sampled_from([0.01, 0.1, 0.3, 0.7, 1.0]),
    "repetition_penalty": st.sampled_from([0.5, 1.1, 1.25, 2.0]),
    "presence_penalty": st.integers(-16, 16).map(lambda n: n / 8),
    "frequency_penalty": st.integers(-16, 16).map(lambda n: n / 8),
    "logit_bias": st.dictionaries(tokens, eighths, min_size=1, max_size=4),
    "min_tokens": st.integers(1, 8),
}


@st.composite
def cases(draw: st.DrawFn, fields: Sequence[str], positions: int, drafts: int, greedy: bool = False) -> Case:
    chosen: dict[str, Any] = {name: draw(FIELDS[name]) for name in fields}
    if greedy:
        chosen["temperature"] = 0.0
    row = st.lists(eighths, min_size=V, max_size=V)
    return Case(
        params(**chosen),
        np.array(draw(st.lists(row, min_size=positions, max_size=positions))),
        draw(st.lists(tokens, min_size=1, max_size=3)),
        draw(st.lists(tokens, max_size=5)),
        draw(st.lists(tokens, min_size=drafts, max_size=drafts)),
        draw(st.lists(tokens, min_size=1, max_size=3, unique=True)),
    )


@st.composite
def any_case(draw: st.DrawFn, positions: int, drafts: int, greedy: bool = False) -> Case:
    fields = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True))
    return draw(cases(fields, positions, drafts, greedy))


@pytest.mark.parametrize("name", FIELDS)
@derived(max_examples=25)
@given(data=st.data())
def test_every_parameter_alone(name: str, data: st.DataObject) -> None:
    check(data.draw(cases([name], 4, 3)))


@derived(max_examples=150)
@given(data=st.data())
def test_random_combinations_at_all_positions(data: st.DataObject) -> None:
    positions = data.draw(st.integers(1, 5))
    check(data.draw(any_case(positions, positions - 1)))


@derived(max_examples=100)
@given(data=st.data())
def test_one_position_behind_many_drafts(data: st.DataObject) -> None:
    """As the head's drafts are filtered: all of the drafts precede the one position."""
    check(data.draw(any_case(1, data.draw(st.integers(0, 4)))))


@derived(max_examples=60)
@given(data=st.data())
def test_a_greedy_row_feels_no_filter(data: st.DataObject) -> None:
    """Penalties, bias and withheld stops move its argmax; temperature, top-k, top-p and min-p cannot."""
    check(data.draw(any_case(3, 2, greedy=True)))


@derived(max_examples=100)
@given(data=st.data())
def test_a_row_in_a_mixed_batch_equals_the_row_alone(data: st.DataObject) -> None:
    """Exactly: a row's law must not depend on which filters its neighbours ask for."""
    positions = data.draw(st.integers(1, 3))
    drafts = positions - 1 if positions > 1 else data.draw(st.integers(0, 2))
    greedy = st.booleans()
    batch = [data.draw(any_case(positions, drafts, data.draw(greedy))) for _ in range(data.draw(st.integers(2, 4)))]
    for case, together in zip(batch, chain(batch), strict=True):
        assert np.array_equal(chain([case])[0], together)


def support(logits: Sequence[float], **given: Any) -> list[int]:
    """Which of up to V tokens the chain keeps."""
    padded = np.array([[*logits, *[-30.0] * (V - len(logits))]], dtype=np.float64)
    kept = np.isfinite(chain([Case(params(**given), padded, [0], [], [], [])])[0][0])
    return [token for token in range(len(logits)) if kept[token]]


def test_ties_at_the_border_are_kept() -> None:
    assert support([3, 2, 2, 1], top_k=2) == [0, 1, 2]
    assert support([0, 0, 0, 0], top_k=1) == [0, 1, 2, 3]
    assert support([0, 0, 0, 0], top_p=0.3) == [0, 1, 2, 3]
    assert support([1, 1, 0, 0], min_p=1.0) == [0, 1]


def test_top_p_keeps_the_token_that_crosses_the_border() -> None:
    laws = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert support(laws, top_p=0.4) == [0]
    assert support(laws, top_p=0.6) == [0, 1]
    assert support(laws, top_p=0.9) == [0, 1, 2]
    assert support(laws, top_p=1e-6) == [0]
    assert support(laws, top_p=1.0) == [0, 1, 2, 3]


def test_top_p_measures_what_top_k_left() -> None:
    """Of 0.5 : 0.3 the first is 62%: top_p 0.6 needs no second, where 60% of the whole law needs one."""
    laws = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert support(laws, top_p=0.6, top_k=2) == [0]
    # Ties that top-k let in count as mass: 0.4 : 0.3 : 0.3.
    assert support(np.log([0.4, 0.3, 0.3]).tolist(), top_p=0.45, top_k=2) == [0, 1, 2]


def test_min_p_is_relative_to_the_largest_after_temperature() -> None:
    laws = np.log([0.6, 0.2, 0.1, 0.1]).tolist()
    assert support(laws, min_p=0.3) == [0, 1]
    assert support(laws, min_p=0.3, temperature=4.0) == [0, 1, 2, 3]  # shares 1, 0.76, 0.64, 0.64
    assert support(laws, min_p=0.3, temperature=0.5) == [0]  # shares 1, 0.11, ...


def test_bias_comes_after_penalties_and_before_temperature() -> None:
    logits = np.zeros((1, V))
    logits[0, :2] = 4, -1
    asked = params(repetition_penalty=2.0, logit_bias={0: 3.0, 1: 3.0}, temperature=0.5)
    found = chain([Case(asked, logits, [0, 1], [], [], [])])[0][0]
    assert found[0] == (4 / 2 + 3) / 0.5
    assert found[1] == (-1 * 2 + 3) / 0.5


def test_presence_and_frequency_pass_over_the_prompt() -> None:
    asked = params(presence_penalty=1.0, frequency_penalty=0.5)
    found = chain([Case(asked, np.zeros((1, V)), [0, 1], [1, 2, 2], [], [])])[0][0]
    assert found.tolist() == [0, -1.5, -2, 0, 0, 0, 0, 0]


def test_drafts_before_a_position_count_as_output() -> None:
    """A draft weighs on the positions after it, not on its own and not on those before."""
    asked = params(frequency_penalty=1.0)
    found = chain([Case(asked, np.zeros((3, V)), [0], [], [5, 5], [])])[0]
    assert found[:, 5].tolist() == [0, -1, -2]


def test_min_tokens_goes_by_the_emitted_index() -> None:
    """Two tokens out, four wanted: positions 0 and 1 emit numbers three and four, and withhold the end token."""
    case = Case(params(min_tokens=4), np.zeros((4, V)), [0], [1, 2], [3, 3, 3], [6])
    assert np.isfinite(chain([case])[0][:, 6]).tolist() == [False, False, True, True]
    drafting = Case(params(min_tokens=4), np.zeros((1, V)), [0], [1, 2], [3], [6])  # this position emits number four
    assert not np.isfinite(chain([drafting])[0][0, 6])
    last = Case(params(min_tokens=4), np.zeros((1, V)), [0], [1, 2], [3, 3], [6])
    assert np.isfinite(chain([last])[0][0, 6])


WIDE = 300  # tokens: more than the kernel's largest top-k


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Filters by the kernel, on the host."""
    kernels_on_host(monkeypatch)
    monkeypatch.setattr(subject, "_THREADS", 128)
    monkeypatch.setattr(subject, "_PER_THREAD", 2)
    monkeypatch.setattr(type(subject.CHECK), "passed", property(lambda self: self is subject.CHECK))
    return monkeypatch


SERVED = [
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.0, "top_k": 20, "top_p": 0.5},
    {"temperature": 1.5, "top_k": 100, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 1},
]
OTHERS = [{"temperature": 0.9, "top_p": 0.7}, {"temperature": 1.2, "top_k": 200, "top_p": 0.9}]


def wide_chain(asked: Sequence[dict[str, Any]], logits: Floats) -> list[Floats]:
    made = Chain([params(**each) for each in asked], [[]] * len(asked), WIDE)
    given = mx.array(logits.astype(np.float32))
    return list(np.array(made(given, [0] * len(asked), [None] * len(asked), None)[0]))


def wide_logits(rows: int) -> Floats:
    return np.round(16 * np.random.default_rng(4).standard_normal((rows, 2, WIDE))) / 8


@needs_compiler
def test_the_kernel_gives_the_law_of_plain_mlx(kernel: pytest.MonkeyPatch) -> None:
    """And a row beside others what it gives alone, by the same sums: whether or not the kernel serves those."""
    asked = [*SERVED, *OTHERS]
    logits = wide_logits(len(asked))
    ran: list[str] = []

    def run(called: Kernel, inputs: Sequence[mx.array], launch: Launch) -> list[mx.array]:
        ran.append(called.name)
        return run_on_host(called, inputs, launch)

    kernels_on_host(kernel, run)
    together = wide_chain(asked, logits)
    assert ran == ["kept_logits"] * 2
    for index, each in enumerate(asked):
        assert np.array_equal(wide_chain([each], logits[index : index + 1])[0], together[index]), each
    kernel.setattr(type(subject.CHECK), "passed", False)
    assert np.array_equal(wide_chain(asked, logits), together)


@needs_compiler
def test_no_row_that_the_kernel_serves_is_sorted(kernel: pytest.MonkeyPatch) -> None:
    """Greedy rows and rows without filters among them."""
    for name in ("sort", "topk", "argsort", "cumsum"):
        kernel.delattr(mx, name)
    laws = wide_chain(SERVED, wide_logits(len(SERVED)))
    assert np.isfinite(laws[1]).all()
    assert np.isfinite(laws[3]).all()
    assert np.isfinite(laws[0]).sum() < 2 * WIDE
    with pytest.raises(AttributeError):
        wide_chain([*SERVED, OTHERS[0]], wide_logits(len(SERVED) + 1))


def test_a_history_counts_every_token() -> None:
    history = History([1, 1], V)
    history.emit([3, 3, 5])
    history.emit([])
    history.emit([3])
    assert history.output.tolist() == [0, 0, 0, 3, 0, 1, 0, 0]
    assert history.prompt.tolist() == [False, True, *[False] * 6]
