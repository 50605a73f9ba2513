"""Guards the modes: they decide on the size of buffers and on nothing else, sustained rows are never copied, turbo has
few sizes, and what is promised to a row is what it may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import mlx.core as mx
import pytest

from selfdraft import SamplingParams, load
from selfdraft.engine import RULES, Engine, EngineMode, Request, Row, noise
from selfdraft.engine.modes import TURBO_TOKENS, Plan, plan
from selfdraft.errors import InvalidRequest, OutOfMemoryBudget
from selfdraft.models.few_rows import use_few_row_kernels
from selfdraft.sessions import PromptSession, SessionBank
from selfdraft.settings import Settings, load_settings
from selfdraft.state import KeyValues, kv
from tests.server.conftest import running
from tests.support.budgets import budget_of
from tests.support.nano import FOR_KERNELS, SMALLER, nano_model
from tests.support.plain_kernels import plain_kernels
from tests.support.rows import finish, params, request

MODES: tuple[EngineMode, ...] = ("turbo", "sustained")
CHUNK = 24
GROWTH = 8  # sizes of a few entries, so that short texts meet many
TEXT = [(7 * i + i // 5) % 16 for i in range(150)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11, "top_p": 0.9},
    "sampled": {"temperature": 0.8, "top_k": 7},
}


class Copies:
    """Buffers that were made anew because one was too small: (entries before, entries after) of each."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int]] = []
        grown = kv._grown

        def watched(buffer: mx.array | None, entries: int, like: mx.array) -> mx.array:
            if buffer is not None:
                self.seen.append((buffer.shape[2], entries))
            return grown(buffer, entries, like)

        patch.setattr(kv, "_grown", watched)

    def taken(self) -> list[tuple[int, int]]:
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


@pytest.fixture(scope="module")
def plain() -> Any:
    return nano_model(sharpness=3.0, **SMALLER)


@pytest.fixture
def exact_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is rounded up: a buffer one entry too small is copied."""
    monkeypatch.setattr(kv, "GROWTH", 1)
    monkeypatch.setattr(kv, "_SHARE", 10**9)


def buffers(row: Row) -> list[KeyValues]:
    return [layer for layer in (*row.state.attention, *row.state.head) if layer.keys is not None]


def sizes(row: Row) -> set[int]:
    found = {x.shape[2] for layer in buffers(row) for x in (layer.keys, layer.values) if x is not None}
    assert found
    return found


def planned(mode: EngineMode, prompt: int, tokens: int, **given: Any) -> Plan:
    return plan(mode, prompt, tokens, **{"beside": 82, "context": 262_144, **given})


def test_auto_goes_by_the_prompt() -> None:
    """Not by what may be emitted, which servers set high: nobody wants memory for all of that at once."""
    for answer in (1, 40_000):
        assert planned("auto", TURBO_TOKENS, TURBO_TOKENS + answer).mode == "turbo"
        assert planned("auto", TURBO_TOKENS + 1, TURBO_TOKENS + 1 + answer).mode == "sustained"
    assert planned("turbo", 100_000, 200_000).mode == "turbo"
    assert planned("sustained", 1, 2).mode == "sustained"


@pytest.mark.parametrize("mode", MODES)
def test_a_plan_bounds_what_is_made(mode: EngineMode) -> None:
    for prompt, answer in [(1, 1), (300, 20), (4096, 1024), (30_000, 2768), (31_000, 4000), (70_000, 9000)]:
        tokens = prompt + answer
        found = planned(mode, prompt, tokens)
        written = [prompt, prompt + 1, tokens, tokens + 82]
        made = [found.room.entries(end) for end in written]
        assert all(end <= size for end, size in zip(written, made, strict=True))
        assert max(made) == found.entries
        if mode == "sustained":
            assert set(made) == {kv.capacity(tokens + 82)}
        else:
            assert made[0] == made[1]  # nothing is copied before the answer
            assert all(
                size < max(2 * max(end, prompt + 1), kv.GROWTH + 1) for end, size in zip(written, made, strict=True)
            )


def test_limits_win_over_turbo() -> None:
    """A context, which no power of two need go beyond."""
    assert planned("turbo", 4000, 5000, context=5000).entries == kv.capacity(5082) < 8192


@pytest.mark.parametrize("mode", ["auto", "turbo"])
def test_rows_are_kept_within_their_memory(plain: Any, mode: EngineMode) -> None:
    asked = request([1] * 1000, max_tokens=50, temperature=0.0)
    engine = Engine(plain, mode=mode)
    assert engine.plan(asked).entries == 2048
    exact = plain.row_bytes(2048) + plain.working_bytes(1000, 1000)
    for limit, expected in ((exact, "turbo"), (exact - 1, "sustained")):
        taken, need = budget_of(engine, limit).fitted(asked)
        assert engine.add(taken).mode == expected
        assert need.bytes <= limit


def row_of(engine: Engine, asked: Request) -> Row:
    """With noise that is the same in every run, also where the request names no seed."""
    row = engine.add(asked)
    row.stream = noise.stream(5, 0)
    return row


def conversation(model: Any, mode: EngineMode, depths: Sequence[Any], sampling: dict[str, Any]) -> list[Row]:
    """Rows side by side, then a second turn that goes on from what each left; all rows, in order."""
    engine = Engine(model, prefill_chunk=CHUNK, mode=mode, rule=RULES["block"])
    bank = SessionBank(model.new_state, 10**9)
    prompts: list[list[int]] = [TEXT[i : i + length] for i, length in enumerate((1, 5, 40, 61))]
    ended: list[Row] = []
    for _ in range(2):
        asked = [
            Request(
                prompt,
                params(depth=depth, max_tokens=6 + 4 * place, **sampling),
                session=PromptSession(bank, str(place), prompt, [len(prompt) // 2]),
            )
            for place, (prompt, depth) in enumerate(zip(prompts, depths, strict=True))
        ]
        rows = [row_of(engine, one) for one in asked]
        finish(engine)
        for row in rows:
            engine.settle(row)
        prompts = [[*prompt, *row.emitted, 3, 9] for prompt, row in zip(prompts, rows, strict=True)]
        ended += rows
    assert [row.mode for row in ended] == [mode] * len(ended)
    assert all(row.statistics.restored_tokens > 0 for row in ended[len(depths) :])
    return ended


def on_kernels(patch: pytest.MonkeyPatch) -> Any:
    plain_kernels(patch)
    built = nano_model(5, bits=4, sharpness=2.0, **FOR_KERNELS)
    use_few_row_kernels(built)
    return built


@pytest.fixture(params=["plain", "kernels"])
def either(request: pytest.FixtureRequest, plain: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    return plain if request.param == "plain" else on_kernels(monkeypatch)


@pytest.mark.parametrize(
    ("sampling", "depths"), [("greedy", (0, 0, 0, 0)), *((each, (3, 0, 8, 1)) for each in SAMPLINGS)]
)
def test_both_modes_emit_the_same(
    either: Any, sampling: str, depths: Sequence[int], copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, whatever is restored and whoever is beside; in sizes that are different all the time."""
    monkeypatch.setattr(kv, "GROWTH", GROWTH)
    turbo = conversation(either, "turbo", depths, SAMPLINGS[sampling])
    doublings = copies.taken()
    assert doublings  # or both modes would be the same
    sustained = conversation(either, "sustained", depths, SAMPLINGS[sampling])
    made = sum(len(buffers(row)) for row in sustained[len(depths) :])
    assert len(copies.taken()) == 2 * made  # keys and values of what was restored belong to the bank
    for one, other in zip(turbo, sustained, strict=True):
        assert one.emitted == other.emitted
        assert one.cuts == other.cuts
        assert sizes(one) != sizes(other)
        for mine, its in zip(buffers(one), buffers(other), strict=True):
            for name in ("keys", "values"):
                left, right = (getattr(each, name)[:, :, : one.state.head_length] for each in (mine, its))
                assert mx.array_equal(left, right)


def test_a_sustained_row_is_never_copied(either: Any, copies: Copies, exact_sizes: None) -> None:
    """Over chunks of its prompt, to its last token, beside deeper rows, and once its session has what it leaves."""
    engine = Engine(either, prefill_chunk=CHUNK, mode="sustained")
    engine.cycle._wide = True
    bank = SessionBank(either.new_state, 10**9)
    rows = []
    for place, (depth, limit) in enumerate([(8, 28), (8, 19), (1, 12), (0, 9)]):
        session = PromptSession(bank, str(place), TEXT, [31, 100])
        rows.append(engine.add(replace(request(TEXT, depth=depth, max_tokens=limit, temperature=0.0), session=session)))
    finish(engine)
    for row in rows:
        engine.settle(row)
        assert sizes(row) == {len(TEXT) + row.params.max_tokens + 2 * 9 + 64}  # type: ignore[operator]
    assert copies.taken() == []


def test_pairs_that_wait_for_another_head_do_not_make_a_row_grow(plain: Any, copies: Copies, exact_sizes: None) -> None:
    engine = Engine(plain, prefill_chunk=CHUNK, mode="sustained")
    engine.cycle._wide = True
    resting, ending = (
        engine.add(request(TEXT[:5], depth=depth, max_tokens=limit, temperature=0.0))
        for depth, limit in ((8, 90), (1, 65))
    )
    cycles = iter(range(1000))
    resting.policy = SimpleNamespace(choose=lambda rows: 8 * (next(cycles) >= 60), observe=lambda *given: None)  # type: ignore[assignment]
    widest, commit = [0], engine.cycle.commit_history

    def watched(rows: Any, unread: Any = None) -> mx.array:
        if ending in rows:
            widest.append(max(row.pending.hidden.shape[0] for row in rows if row.pending))
        return commit(rows, unread)

    engine.cycle.commit_history = watched  # type: ignore[method-assign]
    ending.policy = SimpleNamespace(
        choose=lambda rows: 1 if len(resting.emitted) >= 60 else 0, observe=lambda *given: None
    )  # type: ignore[assignment]
    finish(engine)
    assert max(widest) > 50
    assert copies.taken() == []


def test_turbo_has_few_sizes_and_grows_by_doubling(plain: Any, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "GROWTH", GROWTH)
    met: dict[EngineMode, set[int]] = {mode: set() for mode in MODES}
    for mode in MODES:
        for length in (1, 9, 20, 47, 90, 139):
            engine = Engine(plain, prefill_chunk=CHUNK, mode=mode)
            row = engine.add(request(TEXT[:length], depth=2, max_tokens=20, temperature=0.0))
            while not row.emitted:
                engine.step()
                assert copies.taken() == []  # the prompt's place is made at once
            while not row.done:
                engine.step()
                met[mode] |= sizes(row)
            grown = copies.taken()
            assert all(after == 2 * before for before, after in grown)
            assert mode == "turbo" or not grown
    assert met["turbo"] <= {GROWTH * 2**i for i in range(6)}
    assert len(met["sustained"]) == 6


def test_auto_on_an_engine(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfdraft.engine.modes.TURBO_TOKENS", 30)
    engine = Engine(plain)
    asked = [engine.add(request(TEXT[:length], max_tokens=20, temperature=0.0)) for length in (30, 31)]
    assert [row.mode for row in asked] == ["turbo", "sustained"]
    finish(engine)
    for row in asked:
        assert f" mode={row.mode} " in row.describe()


@pytest.mark.parametrize("scored", [None, 5])
@pytest.mark.parametrize("limited", [True, False])
def test_what_fits_only_sustained_runs_so(
    plain: Any, monkeypatch: pytest.MonkeyPatch, scored: int | None, limited: bool
) -> None:
    """Between what a request needs sustained and what turbo may come to hold: with a limit, and with what is free."""
    asked = request([1] * 1000, max_tokens=50, temperature=0.0)
    asked = replace(asked, prompt_logprobs=scored)
    engine = Engine(plain)
    needs = [budget_of(engine, 10**9).need(replace(asked, mode=mode)) for mode in ("sustained", "turbo")]
    assert needs[0].bytes < needs[1].bytes
    between = sum(need.bytes for need in needs) // 2
    budget = budget_of(engine, between if limited else 10**9, limited=limited)
    monkeypatch.setattr("selfdraft.budget.free_memory", lambda: between)
    taken, need = budget.fitted(asked)
    assert (taken.mode, need) == ("sustained", needs[0])
    assert engine.add(taken).mode == "sustained"
    small = replace(asked, prompt=asked.prompt[:100])
    assert budget.fitted(small)[0] is small
    monkeypatch.setattr("selfdraft.budget.free_memory", lambda: 10)
    with pytest.raises(OutOfMemoryBudget):
        budget_of(engine, 10).fitted(asked)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [200, 250, 700])
def test_a_row_holds_no_more_than_was_promised(plain: Any, mode: EngineMode, length: int) -> None:
    engine = Engine(plain, mode=mode)
    asked = request([1, 2] * (length // 2), depth=3, max_tokens=20, temperature=0.0)
    need = budget_of(engine, 10**9).need(asked).state
    row = engine.add(asked)
    finish(engine)
    assert sum(x.nbytes for layer in buffers(row) for x in (layer.keys, layer.values) if x is not None) <= need
    assert need == plain.row_bytes(engine.plan(asked).entries)
    if mode == "turbo":
        assert engine.plan(asked).entries in (512, 1024)


def test_the_reference_model_in_both_modes() -> None:
    texts: dict[EngineMode, list[str]] = {}
    for mode in MODES:
        llm = load(settings=load_settings(mode=mode))
        assert llm.describe()["mode"] == llm.engine.mode == mode
        asked = [SamplingParams(depth=3, max_tokens=12, **SAMPLINGS[each]) for each in ("greedy", "greedy", "seeded")]
        prompt = llm.tokens("Write a short story about a penguin.")
        answers = [llm.generate(prompt, each) for each in asked]
        assert llm.sessions is not None
        assert llm.sessions.figures.hits == 2
        texts[mode] = [answer.text for answer in answers]
    assert texts["turbo"] == texts["sustained"]
    assert len(set(texts["turbo"])) == 2


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().mode == "auto"
    monkeypatch.setenv("SELFDRAFT_MODE", "sustained")
    assert load_settings().mode == "sustained"
    assert load_settings(mode="turbo").mode == "turbo"
    with pytest.raises(InvalidRequest, match=r"mode \(SELFDRAFT_MODE\).*'auto', 'turbo', 'sustained' or 'max'.*'fast'"):
        load_settings(mode="fast")
    assert get_args(get_type_hints(Settings)["mode"]) == (*get_args(EngineMode), "max")


def test_a_server_names_its_mode_and_keeps_rows_within_its_memory() -> None:
    settings = load_settings(mode="sustained", memory_limit="300MiB")
    with running(lambda: load(settings=settings)) as server:
        with server.client() as client:
            assert client.get("/health").json()["mode"] == "sustained"
        llm = server.service.llm
        asked = request(TEXT, max_tokens=500, temperature=0.0)
        assert llm.budget.granted.total == 300 * 2**20
        assert llm.budget.need(asked).state == llm.loaded.model.row_bytes(llm.engine.plan(asked).entries)
