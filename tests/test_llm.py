"""The facade: one schema of results, streams that end their rows however they end, defaults of the checkpoint."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import mlx.core as mx
import pytest

from selfdraft import ContextOverflow, InvalidRequest, SamplingParams, load
from selfdraft.settings import load_settings

HELLO = "Hello! Who are you?"
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)


@pytest.fixture(scope="module")
def llm() -> Any:
    return load("reference")


def test_stream_and_generate_give_the_same(llm: Any) -> None:
    params = SamplingParams(max_tokens=40, seed=3, logprobs=2)
    whole = llm.generate(HELLO, params)
    pieces = list(llm.stream(HELLO, params))
    last = pieces[-1].result
    assert "".join(piece.text for piece in pieces) == whole.text == last.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids == last.token_ids
    assert [entry for piece in pieces for entry in piece.logprobs or []] == whole.logprobs
    assert whole.usage.completion_tokens == len(whole.token_ids) == len(whole.logprobs)
    assert whole.finish_reason == "stop"
    assert whole.token_ids[-1] in llm.tokenizer.eos_ids


def test_prompts_of_every_kind(llm: Any) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    as_messages = llm.generate([{"role": "user", "content": HELLO}], params)
    ids = llm.tokens(HELLO)
    assert llm.generate(HELLO, params).token_ids == as_messages.token_ids == llm.generate(ids, params).token_ids
    assert llm.tokens("<|im_start|>x", raw=True)[0] == llm.tokenizer.token_id("<|im_start|>")
    assert len(llm.tokens("x", raw=True)) < len(llm.tokens("x"))


def test_a_prompt_may_be_cut_finely(llm: Any) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    fine = load("reference", settings=load_settings(prefill_chunk=16))
    assert fine.generate(HELLO, params).token_ids == llm.generate(HELLO, params).token_ids
    assert 0 <= llm._stride - fine._stride < llm.engine.prefill_chunk  # the same, rounded up to whole chunks


@pytest.mark.parametrize("prompt", ["", [], None, 5, [1, "a"], [{"role": "user", "content": "x"}, 3], [True]])
def test_no_prompt(llm: Any, prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(prompt)
    assert llm.engine.rows == []


def test_defaults_come_from_the_checkpoint(llm: Any) -> None:
    params = SamplingParams(top_k=3).resolved(llm.defaults)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.95, 3, 0.0)
    assert SamplingParams.defaults_from_generation_config({"do_sample": False, "temperature": 0.7}) == {
        "temperature": 0.0
    }


@pytest.mark.parametrize("tokens", [0, 3, 12])
def test_memory_of_an_answer_is_given_back_at_once(llm: Any, tokens: int) -> None:
    """Whole, dropped or cancelled in mid-answer: none waits for Python's garbage collector."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    llm.generate(HELLO, params)
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        for _ in range(3):
            stream = llm.stream(HELLO, params)
            for number, _ in enumerate(stream):
                if number == tokens:
                    break
            del stream
        assert mx.get_active_memory() < before + 100_000
    finally:
        gc.enable()


def test_a_dropped_stream_ends_its_row(llm: Any) -> None:
    for _ in llm.stream(HELLO, LONG):
        break
    assert llm.engine.rows == []
    stream = llm.stream(HELLO, LONG)
    assert next(stream)
    assert len(llm.engine.rows) == 1
    stream.close()
    assert llm.engine.rows == []
    assert list(stream) == []


@pytest.mark.parametrize("pieces_before", [0, 1, 4])
def test_cancel_keeps_what_was_emitted(llm: Any, pieces_before: int) -> None:
    stream = llm.stream(HELLO, LONG)
    before = [next(stream) for _ in range(pieces_before)]
    stream.cancel()
    *rest, last = list(stream)
    emitted = [token for piece in [*before, *rest] for token in piece.token_ids]
    assert last.result.finish_reason == "cancelled"
    whole = llm.generate(HELLO, dataclasses.replace(LONG, max_tokens=len(emitted) + 1))
    assert last.result.token_ids == emitted == whole.token_ids[:-1]
    assert len(emitted) < 200
    assert llm.engine.rows == []


def test_interleaved_streams_equal_solo_ones(llm: Any) -> None:
    prompts = [HELLO, "What is 58 + 67?", "Give me five fruits as a numbered list."]
    params = SamplingParams(max_tokens=24, seed=5)
    solo = [llm.generate(prompt, params) for prompt in prompts]
    together = llm.generate_many(prompts, params)
    assert [result.token_ids for result in together] == [result.token_ids for result in solo]
    assert [result.text for result in together] == [result.text for result in solo]


def test_stop_strings(llm: Any) -> None:
    full = llm.generate(HELLO, SamplingParams(max_tokens=40, temperature=0))
    stop = full.text[12:17]
    cut = llm.generate(HELLO, SamplingParams(max_tokens=40, temperature=0, stop=[stop]))
    assert cut.text == full.text[: full.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
    assert cut.usage.completion_tokens == len(cut.token_ids) < len(full.token_ids)


def test_figures_add_up(llm: Any) -> None:
    llm.sessions.clear()  # the prompt was forwarded before
    result = llm.generate(HELLO, SamplingParams(max_tokens=30, depth=3, temperature=0, ignore_eos=True))
    timings = result.timings
    assert sum(timings.emitted.values()) == 30
    assert timings.emitted["prefill"] == 1
    assert timings.tokens_per_cycle == pytest.approx(29 / timings.cycles, abs=1e-4)
    assert timings.trunk_forwards == 2 + timings.cycles
    assert timings.trunk_replays == 0
    body = result.to_dict()
    assert set(body) == {"schema_version", "text", "finish_reason", "usage", "timings"}
    assert {field.name for field in dataclasses.fields(timings)} == set(body["timings"])


def test_bad_requests_name_the_value_and_leave_nothing(llm: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"depth 9 .*0\.\.8"):
        llm.stream(HELLO, SamplingParams(depth=9))
    with pytest.raises(ContextOverflow, match="has 40000: shorten it"):
        llm.stream([1] * 40000)
    with pytest.raises(InvalidRequest, match="8192"):
        llm.stream([8192])
    with pytest.raises(InvalidRequest, match="logit_bias"):
        llm.stream(HELLO, SamplingParams(logit_bias={9000: 1.0}))
    assert llm.engine.rows == []


def test_prefill_progress(llm: Any) -> None:
    seen: list[tuple[int, int]] = []
    llm.engine._prefill._chunk, before = 8, llm.engine._prefill._chunk
    try:
        llm.generate([5] * 30, SamplingParams(max_tokens=1), on_prefill=lambda *figures: seen.append(figures))
    finally:
        llm.engine._prefill._chunk = before
    assert {(8, 30), (16, 30), (24, 30), (29, 30), (30, 30)} <= set(seen)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("token", [-1, 2**31, 2**40])
def test_ids_out_of_range_are_refused_by_name(llm: Any, token: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token id {token} is outside"):
        llm.generate([1, token])
