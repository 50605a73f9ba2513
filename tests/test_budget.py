"""Guards the one memory budget: nothing is read or forwarded that does not fit, a user's limit wins and is kept, and
what is told beforehand is at least what is taken.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from selfdraft import SamplingParams, load, memory
from selfdraft.budget import MemoryBudget, Need, together
from selfdraft.engine import Engine
from selfdraft.errors import OutOfMemoryBudget
from selfdraft.llm import LLM
from selfdraft.memory import Allowance
from selfdraft.models import loader
from selfdraft.settings import load_settings
from tests.support.budgets import budget_of

MIB = 2**20
GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load("reference")


def budget(context: int, total: int) -> MemoryBudget:
    """Of a model whose rows take a byte a token."""
    model: Any = SimpleNamespace(context_length=context, row_bytes=lambda tokens: tokens, vocab_size=8)
    return budget_of(SimpleNamespace(model=model), total)


# The reply limit that clients are told: a part of the context, and of the memory.


@pytest.mark.parametrize(("context", "limit"), [(32_768, 8_192), (4096, 1024), (131_072, 32_768), (1_000_000, 32_768)])
def test_an_answer_takes_a_part_of_the_context(context: int, limit: int) -> None:
    assert budget(context, 10**9).reply_tokens() == limit


def test_less_where_four_such_answers_and_prompts_would_not_fit() -> None:
    assert budget(131_072, 4 * 2 * 8192).reply_tokens() == 8192
    assert budget(131_072, 4 * 2 * 8192 - 1).reply_tokens() == 4096
    assert budget(131_072, 1).reply_tokens() == 256  # an answer has to be one
    assert budget(2, 10**9).reply_tokens() == 1


# Weights


@pytest.mark.parametrize("limit", ["40MiB", None])
def test_weights_that_do_not_fit_are_refused_before_any_is_read(
    monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    def read(*given: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loader, "_read", read)
    monkeypatch.setattr(memory, "free_memory", lambda: 40 * MIB)
    monkeypatch.setattr(memory, "device_memory", lambda: 50 * MIB)
    held = mx.get_active_memory()
    with pytest.raises(OutOfMemoryBudget) as refused:
        load("reference", settings=load_settings(memory_limit=limit, dtype="float32"))
    said = str(refused.value)
    assert "the weights need 0.08 GiB" in said
    assert "0.04 GiB" in said
    assert ("memory_limit is" in said) == (limit is not None)
    assert ("close other programs" in said) == (limit is None) == refused.value.later
    assert "smaller or a quantised model" in said
    assert mx.get_active_memory() - held < MIB


def test_a_limit_of_the_user_wins_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    monkeypatch.setattr(memory, "device_memory", lambda: 300 * MIB)
    llm = load("reference", settings=load_settings(memory_limit="301MiB"))
    (note,) = [note for note in llm.notes if "memory_limit" in note]
    assert "0.29 GiB is more than the 0.29 GiB that this device has: it is obeyed" in note
    assert llm.generate("Hello!", GREEDY).token_ids
    llm = load("reference", settings=load_settings(memory_limit="300MiB"))
    assert not [note for note in llm.notes if "memory_limit" in note]
    assert llm.budget.total == int(0.9 * (300 * MIB - llm.loaded.nbytes))


def test_mlx_is_told_of_the_limit_beside_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"set_memory_limit": 200, "set_cache_limit": 170}
    for name in ("set_memory_limit", "set_cache_limit", "set_wired_limit"):

        def put(nbytes: int, name: str = name) -> int:
            before = told.get(name, 0)
            told[name] = nbytes
            return before

        monkeypatch.setattr(mx, name, put)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 7)
    monkeypatch.setattr(memory, "_own_limits", functools.cache(memory._own_limits.__wrapped__))
    Allowance(100, 250, limited=True).enforce()
    assert told == {"set_memory_limit": 257, "set_cache_limit": 150}
    Allowance(100, 190, limited=False).enforce()
    assert told == {"set_memory_limit": 197, "set_cache_limit": 90}
    Allowance(100, 1000, limited=False).enforce()  # MLX's own limits are not raised, but by the user
    assert told == {"set_memory_limit": 200, "set_cache_limit": 170}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 200})
    Allowance(100, 250, limited=True).enforce()
    assert told["set_wired_limit"] == 200


def test_a_limit_beyond_all_machines_is_obeyed() -> None:
    llm = load("reference", settings=load_settings(memory_limit="1000000PiB"))
    assert [note for note in llm.notes if "more than the" in note]
    load("reference")  # MLX's own limits are back


@pytest.mark.parametrize(
    ("info", "free", "most"),
    [
        ({"max_recommended_working_set_size": 900, "memory_size": 1000}, 800, 900),  # Metal
        ({"free_memory": 300, "total_memory": 1000}, 350, 1000),  # CUDA: other programs use it, too
    ],
)
def test_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch, info: dict[str, int], free: int, most: int) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 100)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 50)
    assert (memory.free_memory(), memory.device_memory()) == (free, most)


# Answers


@pytest.mark.parametrize("tokens", [64, 1024, 3000])
def test_no_more_is_taken_than_was_told(llm: LLM, tokens: int) -> None:
    """Rows and chunks together, on a CPU where attention holds all scores; and the estimate is of the same order."""
    params = SamplingParams(max_tokens=4, depth=2, cache_prompt=False, ignore_eos=True)
    prompt = [5] * tokens
    need = llm.budget.need(llm.answer(prompt, params).request)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    llm.generate(prompt, params)
    taken = mx.get_peak_memory() - before
    assert taken <= need.bytes
    assert taken > need.bytes / 4 or tokens == 64


@pytest.mark.parametrize("how", ["generate", "stream", "score"])
def test_an_answer_that_does_not_fit_is_refused_before_it_begins(how: str) -> None:
    llm = load("reference", settings=load_settings(memory_limit="150MiB"))
    prompt = [5] * 20_000
    with pytest.raises(OutOfMemoryBudget) as refused:
        getattr(llm, how)(prompt) if how == "score" else getattr(llm, how)(prompt, GREEDY)
    said = str(refused.value)
    assert "20000 prompt tokens and up to" in said
    assert "GiB beside the weights" in said
    assert "prefill_chunk" in said
    assert not refused.value.later
    assert not llm.engine.rows
    assert llm.generate("Hello!", GREEDY).token_ids  # what fits goes on


def test_what_is_not_free_now_is_refused_without_a_limit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfdraft.budget.free_memory", lambda: 1000)
    assert llm.sessions is not None
    llm.sessions.clear()
    with pytest.raises(OutOfMemoryBudget, match="free now: close other programs") as refused:
        llm.generate("Hello!", GREEDY)
    assert refused.value.later


def test_answers_side_by_side_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load("reference")
    one = llm.budget.need(llm.answer([5] * 40, GREEDY).request)
    monkeypatch.setattr(llm, "budget", budget_of(llm.engine, together([one] * 3)))
    assert len(llm.generate_many([[5] * 40] * 3, GREEDY)) == 3
    with pytest.raises(OutOfMemoryBudget, match=r"4 answers side by side need .*: run fewer at a time"):
        llm.generate_many([[5] * 40] * 4, GREEDY)
    streams = [llm.stream([5] * 40, GREEDY) for _ in range(3)]
    for stream in streams:
        next(stream)
    with pytest.raises(OutOfMemoryBudget, match="4 answers side by side"):
        llm.stream([5] * 40, GREEDY)
    streams.pop().close()
    llm.stream([5] * 40, GREEDY)


def test_chunks_take_turns() -> None:
    assert together([]) == 0
    assert together([Need(1, 10), Need(2, 30), Need(4, 20)]) == 37


def test_warm_prefixes_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load("reference")
    assert llm.sessions is not None
    for first in range(1, 5):
        llm.generate([first] * 60, GREEDY)
    before = llm.session_bytes
    need = llm.budget.need(llm.answer([9] * 60, GREEDY).request)
    monkeypatch.setattr(llm, "budget", budget_of(llm.engine, need.bytes + before // 2))
    llm.stream([9] * 60, GREEDY)
    assert 0 < llm.session_bytes <= before // 2


def test_a_row_counts_what_its_engine_plans(llm: LLM) -> None:
    short = llm.answer([5] * 10, GREEDY).request
    engine = Engine(llm.loaded.model, prefill_chunk=64)
    long = llm.answer([5] * 300, GREEDY).request
    model = llm.loaded.model
    assert budget_of(engine, 10**9).need(long).working == model.working_bytes(64, 300)
    assert budget_of(engine, 10**9).need(short).working == model.working_bytes(10, 10)
