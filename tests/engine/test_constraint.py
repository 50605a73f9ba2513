"""Guards rows with a constraint: exact under its mask at every depth, never outside its language, no cost to others.

The constraint is a hand-written automaton over the nano vocabulary. The law under its mask is enumerated from the trunk
itself and sampled through the engine; streams come from a counter, so a run is deterministic and raises no false alarm
while model and noise stay as they are (odds of one at a change: 8 p-values below 1e-4, one in 1,000 changes).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfdraft.engine import RULES, Engine, Request, Row, noise
from selfdraft.engine.constraint import allowed_tokens
from selfdraft.errors import InvalidRequest, SelfdraftError
from tests.support.chi_square import against_law
from tests.support.nano import SMALLER, nano_model, well_drafted_model
from tests.support.rows import finish, fork_rows, params, prefill_all, solo
from tests.support.scripted import ScriptedHead

V = 16
END = 15
STOPS = frozenset([END])
PROMPT = [3, 1, 4]
TOKENS = 12


class Automaton:
    """A constraint by table: allowed[s, t] says whether state s takes token t, into state goto[s, t]."""

    def __init__(self, allowed: npt.NDArray[np.bool_], goto: npt.NDArray[np.int64]) -> None:
        self._allowed = allowed
        self._goto = goto
        self.state = 0
        self.asked: list[tuple[int, ...]] = []

    def allowed(self, drafts: Sequence[int]) -> npt.NDArray[np.bool_]:
        self.asked.append(tuple(drafts))
        masks = np.zeros((len(drafts) + 1, self._allowed.shape[1]), dtype=np.bool_)  # nothing behind a forbidden draft
        state = self.state
        masks[0] = self._allowed[state]
        for position, token in enumerate(drafts):
            if token >= masks.shape[1] or not masks[position, token] or token == END:
                break
            state = int(self._goto[state, token])
            masks[position + 1] = self._allowed[state]
        return masks

    def emit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert self._allowed[self.state, token], "outside the language"
            self.state = int(self._goto[self.state, token])

    def fresh(self) -> Automaton:
        """The same one at its beginning."""
        return Automaton(self._allowed, self._goto)


def automaton(seed: int, *, states: int = 4, share: float = 0.4, vocabulary: int = V, ends: float = 0.5) -> Automaton:
    """A random one without dead ends; a share of tokens is allowed, and ends in some states."""
    dice = np.random.default_rng(seed)
    allowed = dice.random((states, vocabulary)) < share
    allowed[np.arange(states), dice.integers(0, min(vocabulary, END), states)] = True
    if vocabulary > END:
        allowed[:, END] = dice.random(states) < ends
    return Automaton(allowed, dice.integers(0, states, (states, vocabulary)))


def fixed_text(tokens: Sequence[int]) -> Automaton:
    """One sentence, and its end."""
    allowed = np.zeros((len(tokens) + 1, V), dtype=np.bool_)
    allowed[np.arange(len(tokens)), list(tokens)] = True
    allowed[len(tokens), END] = True
    states = np.arange(len(tokens) + 1)[:, None]
    return Automaton(allowed, np.broadcast_to(np.minimum(states + 1, len(tokens)), allowed.shape))


def asked(constraint: Automaton | None, prompt: Sequence[int] = PROMPT, **given: Any) -> Request:
    return Request(prompt, params(**{"max_tokens": TOKENS, **given}), stop_ids=STOPS, constraint=constraint)


@cache
def model() -> Any:
    return nano_model(sharpness=2.0, **SMALLER)


# --- the law


@pytest.fixture
def counted_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh streams of unseeded rows: a hash of a counter in place of the system's randomness."""
    counter = itertools.count()

    def urandom(size: int) -> bytes:
        return hashlib.blake2b(str(next(counter)).encode(), digest_size=size).digest()

    monkeypatch.setattr(noise, "os", SimpleNamespace(urandom=urandom))


@cache
def sampled_model() -> Any:
    return well_drafted_model(sharpness=1.2)


def law(start: Automaton, first: int, tokens: int, temperature: float) -> dict[tuple[int, ...], float]:
    """The joint law of the tokens behind the first one, by one trunk forward for each context."""
    trunk = sampled_model()
    done: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        done, before = {}, done
        contexts = list(before)
        whole = mx.array([[*PROMPT, first, *context] for context in contexts])
        hidden, _ = trunk.forward(whole, [trunk.new_state() for _ in contexts], keep_steps=False)
        logits = np.array(trunk.logits(hidden[:, -1:])[:, 0].astype(mx.float32), dtype=np.float64) / temperature
        for context, z in zip(contexts, logits, strict=True):
            walker = start.fresh()
            walker.emit([first, *context])
            weights = np.where(walker.allowed(())[0], np.exp(z - z.max()), 0)
            for token in np.flatnonzero(weights):
                done[*context, int(token)] = before[context] * float(weights[token] / weights.sum())
    return done


def sample(start: Automaton, first: int, rows: int, rule: str, tokens: int, **given: Any) -> list[Row]:
    engine = Engine(sampled_model(), rule=RULES[rule])
    forked = fork_rows(engine, PROMPT, first, [params(max_tokens=tokens + 1, **given) for _ in range(rows)])
    for row in forked:
        row.request = dataclasses.replace(row.request, constraint=start.fresh(), stop_ids=STOPS)
        row.request.constraint.emit([first])  # type: ignore[union-attr]
    finish(engine)
    return forked


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.usefixtures("counted_streams")
def test_the_law_is_that_of_plain_decoding_under_the_mask(rule: str) -> None:
    """Depths 0 to 3; ends are left out of this automaton, so that every row has all its tokens."""
    start, rows, tokens, temperature = automaton(5, ends=0.0), 450, 4, 0.9
    first = int(np.flatnonzero(start.allowed(())[0])[0])
    exact = law(start, first, tokens, temperature)
    assert len(exact) > 300
    found = {}
    for depth in range(4):
        done = sample(start, first, rows, rule, tokens, depth=depth, temperature=temperature)
        found[depth] = against_law(Counter(tuple(row.emitted[1:]) for row in done), exact)
        if depth:
            tried, kept = sum(r.statistics.tried[0] for r in done), sum(r.statistics.accepted[0] for r in done)
            assert 0.2 < kept / tried < 0.97  # sampling is put to the test
    assert min(found.values()) > 1e-4, found


@pytest.mark.usefixtures("counted_streams")
def test_the_check_sees_another_law() -> None:
    start, tokens = automaton(5, ends=0.0), 4
    first = int(np.flatnonzero(start.allowed(())[0])[0])
    done = sample(start, first, 450, "block", tokens, depth=2, temperature=0.9)
    counts = Counter(tuple(row.emitted[1:]) for row in done)
    assert against_law(counts, law(start, first, tokens, 1.3)) < 1e-4


# --- greedy and seeded rows

COUPLED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 6, "min_p": 0.02, "seed": 4},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.7},
    {"temperature": 1.2, "presence_penalty": 0.5, "logit_bias": {3: 2.0, END: -1.0}, "min_tokens": 5, "seed": 5},
]


@pytest.mark.parametrize("given", COUPLED)
def test_the_text_is_the_same_at_every_depth(given: dict[str, Any]) -> None:
    """With a head that is often right, so that drafts are kept and rejected."""
    kept = 0
    for number in range(3):
        start = automaton(number)
        plain = solo(model(), asked(start.fresh(), depth=0, **given))
        assert plain.error is None
        for depth in (1, 2, 3, 5, "auto"):
            head = ScriptedHead(model())
            engine = Engine(head)
            row = engine.add(asked(start.fresh(), depth=depth, **given))
            dice = random.Random(number)
            right = [dice.random() < 0.7 for _ in range(TOKENS)]
            head.follow(row, plain.emitted, right.__getitem__)
            finish(engine)
            assert (row.emitted, row.finish_reason) == (plain.emitted, plain.finish_reason)
            kept += sum(row.statistics.accepted)
    assert kept > 20


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    states=st.integers(1, 6),
    share=st.sampled_from([0.1, 0.4, 0.8]),
    depth=st.sampled_from([0, 1, 3, 5]),
    rule=st.sampled_from(sorted(RULES)),
    sampling=st.sampled_from([{"temperature": 1.0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.0}]),
    scripted=st.lists(st.integers(0, V - 1), min_size=1, max_size=TOKENS),
)
def test_every_text_is_in_the_language(
    seed: int, states: int, share: float, depth: int, rule: str, sampling: dict[str, Any], scripted: list[int]
) -> None:
    """Also when the head drafts at will; `Automaton.emit` checks each token."""
    head = ScriptedHead(model())
    engine = Engine(head, rule=RULES[rule])
    start = automaton(seed, states=states, share=share)
    constraint = start.fresh()
    row = engine.add(asked(constraint, depth=depth, **sampling))
    head.script(row.state, lambda index: scripted[index % len(scripted)])
    while engine.rows:
        emitted = list(row.emitted)
        engine.step()
        assert row.emitted[: len(emitted)] == emitted
        replayed = start.fresh()
        replayed.emit(row.emitted)
        assert replayed.state == constraint.state  # drafts left no trace
    assert row.error is None
    assert END not in row.emitted[:-1]
    assert row.finish_reason == ("stop" if row.emitted[-1] == END else "length")


# --- ends


def test_a_forced_text_is_emitted_and_ends() -> None:
    text = [7, 0, 7, 7, 2, 9]
    for depth in (0, 1, 3):
        row = solo(model(), asked(fixed_text(text), depth=depth, temperature=1.0))
        assert row.emitted == [*text, END]
        assert row.finish_reason == "stop"


def test_the_first_draft_is_masked_too() -> None:
    """q knows the mask of position 0: a forced token is drafted and kept, which the bare head would rarely say."""
    row = solo(model(), asked(fixed_text([7, 0, 7, 7, 2, 9, 1, 1]), depth=1, temperature=1.0))
    assert row.statistics.accepted[0] == row.statistics.tried[0] > 3


def test_min_tokens_withholds_ends_as_long_as_something_else_is_allowed() -> None:
    text = [7, 0, 7]
    row = solo(model(), asked(fixed_text(text), depth=2, min_tokens=10, temperature=0.0))
    assert row.emitted == [*text, END]
    loop = Automaton(np.ones((1, V), dtype=np.bool_), np.zeros((1, V), dtype=np.int64))
    for depth in (0, 2):
        row = solo(model(), asked(loop.fresh(), depth=depth, min_tokens=10, temperature=1.0, logit_bias={END: 100}))
        assert row.emitted[10:] == [END]
        assert END not in row.emitted[:10]


def test_ignore_eos_does_not_go_on_behind_a_sentence() -> None:
    row = solo(model(), asked(fixed_text([7, 0, 7]), depth=3, ignore_eos=True, temperature=0.0))
    assert row.emitted == [7, 0, 7, END]
    assert row.finish_reason == "stop"


def test_a_constraint_needs_end_tokens() -> None:
    with pytest.raises(InvalidRequest, match="end token"):
        Engine(model()).add(Request(PROMPT, params(temperature=0.0), constraint=fixed_text([1])))


def test_a_dead_end_ends_its_row_at_the_same_token_at_every_depth() -> None:
    table = np.zeros((5, V), dtype=np.bool_)
    table[np.arange(4), [7, 0, 7, 9]] = True  # and nothing in state 4
    dead = Automaton(table, np.broadcast_to(np.minimum(np.arange(5)[:, None] + 1, 4), table.shape))
    for depth in (0, 1, 3):
        head = ScriptedHead(model())
        engine = Engine(head)
        row = engine.add(asked(dead.fresh(), depth=depth, temperature=0.0))
        other = engine.add(asked(None, depth=depth, temperature=0.0))
        head.follow(row, [7, 0, 7, 9, 4, 4])
        finish(engine)
        assert row.emitted == [7, 0, 7, 9]
        assert isinstance(row.error, SelfdraftError)
        assert "after 4 tokens" in str(row.error)
        assert other.emitted == solo(model(), asked(None, depth=0, temperature=0.0)).emitted
        with pytest.raises(SelfdraftError, match="dead end"):
            list(engine.run(row))


def test_a_dead_end_at_once() -> None:
    nothing = Automaton(np.zeros((1, V), dtype=np.bool_), np.zeros((1, V), dtype=np.int64))
    row = solo(model(), asked(nothing, depth=2, temperature=1.0))
    assert row.emitted == []
    assert "after 0 tokens" in str(row.error)


def test_ids_beyond_the_mask_are_never_allowed() -> None:
    """A model's vocabulary is often padded beyond its tokenizer's."""
    narrow = automaton(1, vocabulary=9, share=1.0)
    for depth in (0, 3):
        row = solo(model(), asked(narrow.fresh(), depth=depth, temperature=3.0, logit_bias={12: 50}, max_tokens=40))
        assert row.error is None
        assert max(row.emitted) < 9


def test_a_mask_wider_than_the_vocabulary_is_cut() -> None:
    wide = automaton(1, vocabulary=V + 5)
    assert allowed_tokens([wide, None], [[], []], 1, V).tokens.shape == (2, 1, V)


# --- cost and company


@pytest.mark.parametrize(("depths", "waits"), [((2, 2), 2), ((0, 0), 1), ((0, 2), 1), ((2, 0), 2)])
def test_waits_for_the_device(depths: tuple[int, int], waits: int) -> None:
    """The first row has a constraint. A second wait is for its drafts, if it has any."""
    engine = Engine(model())
    rows = [
        engine.add(asked(constraint, depth=depth, temperature=0.0))
        for constraint, depth in zip((automaton(2, ends=0.0), None), depths, strict=True)
    ]
    prefill_all(engine)
    while all(not row.done and row.remaining > 1 for row in rows):
        before = engine.cycle.synchronisations
        engine.step()
        assert engine.cycle.synchronisations - before == waits
    assert rows[0].statistics.cycles > 1


def test_nothing_is_asked_twice_and_rows_without_a_constraint_wait_once() -> None:
    engine = Engine(model())
    free = engine.add(asked(None, depth=2, temperature=0.0))
    prefill_all(engine)
    engine.step()
    assert engine.cycle.synchronisations == 1
    constraint = automaton(2, ends=0.0)
    row = engine.add(asked(constraint, depth=2, temperature=0.0))
    while not row.statistics.cycles:
        engine.step()
    # The first token, the first draft, and what follows the drafts.
    assert [len(drafts) for drafts in constraint.asked] == [0, 0, 2]
    assert free.error is None


def test_a_row_with_a_constraint_does_not_run_ahead() -> None:
    head = ScriptedHead(model())
    engine = Engine(head)
    row = engine.add(asked(automaton(2, ends=0.0), depth=0, temperature=0.0))
    finish(engine)
    assert len(row.emitted) == TOKENS
    assert len(head.forwards) == row.statistics.timings().trunk_forwards
    assert engine.cycle.rows_ahead == []


def test_rows_with_and_without_constraints_decode_as_if_alone() -> None:
    kinds: list[tuple[Automaton | None, dict[str, Any]]] = [
        (automaton(3), {"depth": 3, "temperature": 0.0}),
        (None, {"depth": 2, "temperature": 1.0, "seed": 1, "top_p": 0.9}),
        (automaton(4), {"depth": 0, "temperature": 1.0, "seed": 2}),
        (None, {"depth": 0, "temperature": 0.0, "ignore_eos": True}),
        (automaton(6), {"depth": 1, "temperature": 0.7, "seed": 3, "frequency_penalty": 0.5, "logprobs": 2}),
        (None, {"depth": 5, "temperature": 0.0, "min_tokens": 4}),
    ]
    engine = Engine(model())
    rows = [
        engine.add(asked(start and start.fresh(), PROMPT[i % 3 :] + [i], **given_))
        for i, (start, given_) in enumerate(kinds)
    ]
    for _ in range(3):
        engine.step()
    finish(engine)
    for i, (row, (start, given_)) in enumerate(zip(rows, kinds, strict=True)):
        alone = solo(model(), asked(start and start.fresh(), PROMPT[i % 3 :] + [i], **{**given_, "depth": 0}))
        assert (row.emitted, row.finish_reason, row.scores) == (alone.emitted, alone.finish_reason, alone.scores)
