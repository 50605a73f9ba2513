"""What the bank restores is, bit for bit, what a fresh forward of the same tokens with the same cuts gives.

Random conversations: prompts that go on from the one before, or fork off anywhere in it; stops anywhere; every depth;
rows side by side; answers that end by a stop token, a text stop, their length, or a cancel. Every boundary that a row
goes on from, and every one that is left in the bank, is compared with `replay`; every greedy answer with that of a row
that goes on from the replayed boundary in an engine without a bank.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfdraft.engine import Boundary, Engine, Request, Row
from selfdraft.engine.session import Cut
from selfdraft.models import step3p5
from selfdraft.sessions import PromptSession, SessionBank
from selfdraft.sessions.tree import walk
from tests.reference.families import FAMILIES
from tests.support.nano import SMALLER, nano_model
from tests.support.rows import finish, params
from tests.support.sessions import CutsOnly, Known, differences, replay

CHUNK = 8
KINDS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"dtype": mx.bfloat16}, "4-bit": {"bits": 4}}
MODELS: dict[str, Any] = {name: nano_model(sharpness=3.0, **SMALLER, **kind) for name, kind in KINDS.items()}
mx.random.seed(3)
MODELS["three modules"] = step3p5.build(FAMILIES["step3p5"].config, True)  # a chain, each behind the one before it


class Watched(PromptSession):
    """Remembers what its row went on from."""

    resumed: tuple[list[int], Boundary] | None = None

    def resume(self, length: int, *, drafts: bool) -> Boundary | None:
        found = super().resume(length, drafts=drafts)
        if found is not None:
            self.resumed = (self._prompt[: found.state.length].tolist(), replace(found, state=found.state.fork()))
        return found


def ask(engine: Engine, bank: SessionBank, prompt: list[int], rng: random.Random) -> tuple[Row, Watched]:
    stops = rng.sample(range(1, len(prompt)), min(len(prompt) - 1, rng.randint(0, 3)))
    session = Watched(bank, "a", prompt, stops)
    depth = rng.choice([0, 1, 3, min(5, engine.model.max_depth), "auto"])
    kind = rng.choice(["length", "stop token", "text stop"])
    request = Request(
        prompt,
        params(temperature=0.0, max_tokens=rng.randint(1, 12), depth=depth),
        stop_ids=frozenset([3]) if kind == "stop token" else frozenset(),
        text_stop=(lambda ids: rng.randint(0, len(ids)) if rng.random() < 0.2 else None)
        if kind == "text stop"
        else None,
        session=session,
    )
    return engine.add(request), session


def check_row(model: Any, row: Row, session: Watched, replayed: Known | None = None) -> None:
    """What it went on from is what a fresh forward gives, and so is what it wrote."""
    known = None
    if session.resumed is not None:
        tokens, boundary = session.resumed
        known = replay(model, tokens, boundary.cuts, head=boundary.drafts, known=replayed)
        assert differences(model, boundary, known) == []
    before = len(known.cuts) if known else 0
    chunks = [cut.end for cut in row.cuts[before:] if cut.chunk]
    assert {end for end in chunks if end % CHUNK} <= {*session.stops, len(row.request.prompt) - 1}
    assert all(end - start <= CHUNK for start, end in pairwise([known.state.length if known else 0, *chunks]))
    if row.request.text_stop is not None:  # its stops are drawn: a second run would stop elsewhere
        return
    fresh = Engine(model, prefill_chunk=CHUNK)
    again = fresh.add(replace(row.request, session=CutsOnly(row.request.prompt, session.stops, known)))
    finish(fresh)
    assert again.emitted[: len(row.emitted)] == row.emitted
    assert again.emitted == row.emitted or row.finish_reason == "cancelled"


def check_bank(model: Any, bank: SessionBank, replayed: Known | None = None) -> int:
    checked, replayed = 0, {} if replayed is None else replayed
    for node in walk(bank.root("a")):
        if node.moment is not None:
            found = bank.resume("a", node.tokens(), longer_than=node.end - 1, drafts=node.drafts)
            assert found is not None
            same_tokens, boundary = found
            tokens = same_tokens.tokens().tolist()
            assert tokens == node.tokens().tolist()
            fresh = replay(model, tokens, boundary.cuts, head=boundary.drafts, known=replayed)
            assert differences(model, boundary, fresh) == []
            checked += 1
    return checked


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_random_conversations(kind: str, seed: int) -> None:
    model, rng = MODELS[kind], random.Random(seed)
    bank, replayed = SessionBank(model.new_state, rng.choice([20_000, 10**9])), Known()
    engine = Engine(model, prefill_chunk=CHUNK)
    histories = [[rng.randrange(16) for _ in range(rng.randint(1, 40))]]
    for _ in range(4):
        asked = [ask(engine, bank, list(rng.choice(histories)), rng) for _ in range(rng.randint(1, 2))]
        while engine.rows:
            engine.step()
            if rng.random() < 0.03 and engine.rows:
                engine.cancel(rng.choice(engine.rows))
        for row, session in asked:
            assert row.error is None
            engine.settle(row)
            check_row(model, row, session, replayed)
            whole = [*row.request.prompt, *row.emitted]
            fork = rng.choice([whole, whole, whole[: rng.randint(1, len(whole))]])
            histories.append([*fork, *(rng.randrange(16) for _ in range(rng.randint(1, 12)))])
    check_bank(model, bank, replayed)
    assert bank.figures.bytes == sum(node.nbytes for node in walk(bank.root("a")))
    assert bank.figures.entries == sum(node.moment is not None for node in walk(bank.root("a")))


@pytest.mark.parametrize(("kind", "depth"), [*((kind, 3) for kind in MODELS), ("bf16", 0)])
def test_every_length_of_a_prompt(kind: str, depth: int) -> None:
    """A boundary at every length below that of a prompt of three chunks: on the grid, next to it, between."""
    model = MODELS[kind]
    prompt, replayed = [random.Random(5).randrange(16) for _ in range(3 * CHUNK + 2)], Known()
    for stop in range(1, len(prompt)):
        bank = SessionBank(model.new_state, 10**9)
        texts = []
        for turn in range(2):
            engine = Engine(model, prefill_chunk=CHUNK)
            session = Watched(bank, "a", prompt, [stop])
            row = engine.add(Request(prompt, params(temperature=0.0, max_tokens=6, depth=depth), session=session))
            finish(engine)
            texts.append(row.emitted)
            assert row.statistics.restored_tokens == (stop if turn else 0)
            check_row(model, row, session, replayed)
        assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", MODELS)
def test_the_second_turn_forwards_what_is_new(kind: str) -> None:
    model = MODELS[kind]
    bank = SessionBank(model.new_state, 10**9)
    tokens = [random.Random(7).randrange(16) for _ in range(21)]
    for turn in range(4):
        engine = Engine(model, prefill_chunk=CHUNK)
        session = Watched(bank, "a", tokens, [])
        row = engine.add(Request(tokens, params(temperature=0.0, max_tokens=9, depth=3), session=session))
        finish(engine)
        engine.settle(row)
        check_row(model, row, session)
        assert row.statistics.restored_tokens == (len(tokens) - 5 if turn else 0)
        tokens = [*tokens, *row.emitted, 1, 2, 3, 4, 5]
    assert check_bank(model, bank) == 4


def test_a_borrower_does_not_change_what_it_borrowed() -> None:
    model = MODELS["bf16"]
    bank = SessionBank(model.new_state, 10**9)
    prompt = [random.Random(9).randrange(16) for _ in range(30)]
    engine = Engine(model, prefill_chunk=CHUNK)

    def run(tokens: Sequence[int], depth: int) -> Row:
        session = PromptSession(bank, "a", tokens, [20])
        row = engine.add(Request(tokens, params(temperature=0.0, max_tokens=20, depth=depth), session=session))
        return row

    run(prompt, 3)
    finish(engine)
    kept = replay(model, prompt[:20], (Cut(8, True), Cut(16, True), Cut(20, True)), head=True)
    for round in range(3):  # several at once, each writing behind its own copy
        rows = [run([*prompt[:20], 1 + round, other, 5], depth) for other, depth in ((1, 3), (2, 0), (9, 5))]
        finish(engine)
        assert [row.statistics.restored_tokens for row in rows] == [20, 20, 20]
        found = bank.resume("a", bank.root("a").children[0].tokens(), longer_than=0, drafts=True)
        assert found is not None
        assert differences(model, found[1], kept) == []
