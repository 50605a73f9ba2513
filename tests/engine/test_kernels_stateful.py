"""Guards rows on kernels that write in place: whatever joins, ends, is cancelled or goes on from a session beside them,
each emits what it emits alone at depth 0.

Kernels are stood in for by plain MLX, but write to memory past MLX as on a GPU. Hypothesis plays the callers; the
examples are derived, not random, so there are no false alarms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mlx.utils import tree_flatten

from selfdraft.engine import RULES, Boundary, Engine, Request, Row
from selfdraft.models.few_rows import use_few_row_kernels
from selfdraft.models.qwen3_5 import Qwen35
from selfdraft.sessions import PromptSession, SessionBank
from selfdraft.state import kv
from tests.support.nano import FOR_KERNELS, nano_model
from tests.support.real_memory import RealMemory
from tests.support.rows import finish, params, solo
from tests.support.sessions import differences, replay

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3]
PROMPTS = [tuple(TEXT[:end]) for end in (1, 2, 7, 13, 28)] + [(7, 7, 1), tuple(TEXT[::-1][:20])]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "presence_penalty": 0.7},
    {"temperature": 1.0, "seed": 4},
]
GROWTH = 16  # buffers of a few tokens: their borders are crossed all the time


@pytest.fixture(scope="module")
def memory() -> Iterator[RealMemory]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "GROWTH", GROWTH)
        yield RealMemory(patch)


@cache
def model(**fields: Any) -> Qwen35:
    built = nano_model(5, bits=4, sharpness=2.0, **{**FOR_KERNELS, **fields})
    use_few_row_kernels(built)
    return built


@dataclass(frozen=True)
class Asked:
    """A request as a value."""

    prompt: tuple[int, ...]
    sampling: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()

    def request(self, depth: Any, session: PromptSession | None = None) -> Request:
        given = params(depth=depth, max_tokens=self.max_tokens, **SAMPLINGS[self.sampling])
        return Request(self.prompt, given, stop_ids=self.stop_ids, session=session)


@cache
def alone(asked: Asked, chunk: int) -> tuple[list[int], str | None]:
    row = solo(model(), asked.request(0), prefill_chunk=chunk)
    return row.emitted, row.finish_reason


class Keeping(PromptSession):
    """A session that also remembers each boundary as it was handed over."""

    def __init__(self, kept: list[tuple[list[int], Boundary]], *given: Any) -> None:
        super().__init__(*given)
        self._kept = kept

    def keep(self, tokens: Any, boundary: Boundary) -> None:
        self._kept.append((list(tokens), boundary))
        super().keep(tokens, boundary)


asked_for = st.builds(
    Asked,
    prompt=st.sampled_from(PROMPTS),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    max_tokens=st.sampled_from([1, 3, 9, 20]),
    stop_ids=st.sampled_from([frozenset(), frozenset({3, 11})]),
)
any_depth = st.sampled_from([0, 0, 1, 2, 3, 5, 8, "auto"])
memories: list[RealMemory] = []
met: set[str] = set()  # what rows went through


class Rows(RuleBasedStateMachine):
    @initialize(chunk=st.sampled_from([4, 24]), wide=st.booleans())
    def open(self, chunk: int, wide: bool) -> None:
        self.engine = Engine(model(), prefill_chunk=chunk, rule=RULES["block"])
        self.engine.cycle._wide = wide
        self.bank = SessionBank(model().new_state, 10**9)
        self.chunk = chunk
        self.rows: list[tuple[Row, Asked]] = []
        self.kept: list[tuple[list[int], Boundary]] = []
        self.settled: set[int] = set()
        memories[0].left_out()

    @rule(asked=asked_for, depth=any_depth)
    def join(self, asked: Asked, depth: Any) -> None:
        self.rows.append((self.engine.add(asked.request(depth)), asked))

    @rule(asked=asked_for, depth=any_depth, stops=st.lists(st.sampled_from([1, 2, 5, 7, 12, 13, 19])))
    def join_with_a_session(self, asked: Asked, depth: Any, stops: list[int]) -> None:
        # Cuts decide low bits, which these logits are far from hanging on.
        session = Keeping(self.kept, self.bank, "a", asked.prompt, stops)
        self.rows.append((self.engine.add(asked.request(depth, session)), asked))

    @precondition(lambda self: any(row.done and len(row.emitted) > 1 for row, _ in self.rows))
    @rule(data=st.data(), depth=any_depth, said=st.sampled_from([(2, 7), tuple(TEXT[:21])]))
    def go_on(self, data: st.DataObject, depth: Any, said: tuple[int, ...]) -> None:
        """The next turn of a row that is done, of which its session may know all, a part, or nothing."""
        row, asked = data.draw(st.sampled_from([(r, a) for r, a in self.rows if r.done and len(r.emitted) > 1]))
        following = Asked((*asked.prompt, *row.emitted, *said), 0, 6)
        session = Keeping(self.kept, self.bank, "a", following.prompt)
        self.rows.append((self.engine.add(following.request(depth, session)), following))

    @precondition(lambda self: self.engine.rows)
    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()
            assert memories[0].left_out() == 0, "what a kernel should have written is lost"

    @precondition(lambda self: self.engine.rows)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(self.engine.rows)))

    @rule()
    def settle(self) -> None:
        for row, _ in self.rows:
            if row.done and id(row) not in self.settled:
                self.settled.add(id(row))
                self.engine.settle(row)
                assert memories[0].left_out() == 0, "what a kernel should have written is lost"

    @invariant()
    def nobody_broke_down(self) -> None:
        assert all(row.error is None for row, _ in getattr(self, "rows", []))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        finish(self.engine)
        self.settle()
        for row, asked in self.rows:
            met.add(str(row.finish_reason))
            met.update({"restored"} if row.statistics.restored_tokens else ())
            text, reason = alone(asked, self.chunk)
            if row.finish_reason == "cancelled":
                assert row.emitted == text[: len(row.emitted)]
            else:
                assert (row.emitted, row.finish_reason) == (text, reason)


def test_rows_emit_what_they_emit_alone(memory: RealMemory) -> None:
    memories[:] = [memory]
    run_state_machine_as_test(
        Rows, settings=settings(max_examples=18, stateful_step_count=16, deadline=None, derandomize=True)
    )
    assert met == {"length", "stop", "cancelled", "restored"}


def test_boundaries_are_what_a_fresh_forward_gives(memory: RealMemory) -> None:
    """Bit for bit, though rows that wrote in place went on from each of them; beside others, over three turns."""
    bank, kept = SessionBank(model().new_state, 10**9), list[tuple[list[int], Boundary]]()
    engine = Engine(model(), prefill_chunk=12)
    turns: list[tuple[tuple[int, ...], Row]] = []
    prompt = PROMPTS[4]
    for depth in (3, 8, 1):
        asked = Asked(prompt, 0, 9)
        row = engine.add(asked.request(depth, Keeping(kept, bank, "a", prompt, [7, 19])))
        rival = engine.add(Asked(prompt[:-1], 1, 14).request(2, Keeping(kept, bank, "a", prompt[:-1])))
        beside = engine.add(Asked(prompt[:5], 2, 5).request(5))
        finish(engine)
        assert [each.error for each in (row, rival, beside)] == [None] * 3
        engine.settle(row)
        engine.settle(rival)
        turns.append((prompt, row))
        prompt = (*prompt, *row.emitted, 2, 7)
    assert [row.statistics.restored_tokens > 0 for _, row in turns] == [False, True, True]
    assert len(kept) >= 8
    assert any(len(tokens) > 2 * GROWTH for tokens, _ in kept)
    for tokens, boundary in kept:
        assert differences(model(), boundary, replay(model(), tokens, boundary.cuts, head=boundary.drafts)) == []


def only(*parts: str) -> Any:
    return lambda path, layer: hasattr(layer, "to_quantized") and any(part in path for part in parts)


KINDS: dict[str, tuple[dict[str, Any], Any, bool]] = {  # config; which layers are quantised; whether kernels write
    "bf16": ({"dtype": mx.bfloat16}, None, True),
    "fp16": ({"dtype": mx.float16}, None, True),
    "attention alone": ({"layer_types": ["full_attention"] * 2}, None, True),
    "head alone quantised": ({}, only("mtp"), True),
    "trunk alone quantised": ({}, only("model."), True),
    "gates dense": ({}, only("model.layers.0.linear_attn.in_proj_z", "mlp", "self_attn"), True),
    "dense": ({}, only(), False),
    "biases": ({"attention_bias": True}, None, False),
    "tied": ({"tie_word_embeddings": True}, None, True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_which_kernels_take_a_part(memory: RealMemory, kind: str) -> None:
    """Eight rows of depth 8 are 72 tokens, more than one product takes."""
    config, chosen, writes = KINDS[kind]
    built = nano_model(5, bits=None if chosen else 4, sharpness=2.0, **{**FOR_KERNELS, **config})
    if chosen:
        nn.quantize(built, group_size=32, bits=4, class_predicate=chosen)
    use_few_row_kernels(built)
    calls = memory.calls
    for depths in ((3, 0, 8, 1), (8,) * 8) if kind == "bf16" else ((3, 0, 8, 1),):
        engine = Engine(built, prefill_chunk=12)
        asked = [Asked(PROMPTS[2 + place % 3], place % 3, 7) for place in range(len(depths))]
        rows = [engine.add(one.request(depth)) for one, depth in zip(asked, depths, strict=True)]
        finish(engine)
        assert memory.left_out() == 0
        for row, one in zip(rows, asked, strict=True):
            assert row.emitted == solo(built, one.request(0), prefill_chunk=12).emitted
    assert (memory.calls > calls) == writes


@pytest.mark.parametrize("part", ["self_attn.q_norm", "input_layernorm", "mlp.down_proj"])
def test_layers_of_two_dtypes_are_left_to_mlx(memory: RealMemory, part: str) -> None:
    """Activations change their dtype on the way, which kernels do not take."""
    built: Any = nano_model(5, bits=4, dtype=mx.bfloat16, **FOR_KERNELS)
    weights: Any = tree_flatten(built.parameters())
    named = [(name, x) for name, x in weights if part in name and x.dtype == mx.bfloat16]
    built.load_weights([(name, x.astype(mx.float32)) for name, x in named], strict=False)
    use_few_row_kernels(built)
    calls = memory.calls
    row = solo(built, Asked(PROMPTS[3], 0, 9).request(3))
    assert row.error is None
    assert len(row.emitted) == 9
    assert memory.calls == calls
