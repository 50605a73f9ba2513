"""Guards rollback: any prefix of a verify pass can be committed, and the state is then bit for bit the stepwise one.

This is what makes a rejection cost nothing. It rests on row-exact kernels (CPU, reference BLAS).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.models.base import Model
from selfdraft.state import Captured, CapturedLayer, RowState
from tests.support.nano import nano_model

PROMPT = [3, 1, 4, 1, 5, 9, 2]
WINDOW = [6, 5, 3, 5, 8, 9]  # last, and five drafts
NEXT = 7

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": mx.bfloat16},
    "8-bit": {"bits": 8},
    "8-bit, bf16 scales": {"bits": 8, "dtype": mx.bfloat16},
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return nano_model(**KINDS[request.param])


def forward(model: Model, tokens: Sequence[int], state: RowState, keep: int | None = None) -> mx.array:
    """Run tokens as one verify pass, and commit the first `keep` of them (all by default)."""
    hidden, captured = model.forward(mx.array([list(tokens)]), [state], keep_steps=True)
    captured.commit([state], [len(tokens) if keep is None else keep])
    return hidden


def prefilled(model: Model, prompt: Sequence[int] = PROMPT) -> RowState:
    state = model.new_state()
    _, captured = model.forward(mx.array([list(prompt)]), [state], keep_steps=False)
    captured.commit([state], [len(prompt)])
    mx.eval(state.arrays())
    return state


def assert_same_state(a: RowState, b: RowState) -> None:
    assert a.length == b.length
    for ours, theirs in zip(a.recurrent, b.recurrent, strict=True):
        assert mx.array_equal(ours.window, theirs.window)
        assert mx.array_equal(ours.memory, theirs.memory)
        assert ours.memory.dtype == mx.float32
    for mine, other in zip(a.attention, b.attention, strict=True):
        for one, two in ((mine.keys, other.keys), (mine.values, other.values)):
            assert one is not None
            assert two is not None
            assert mx.array_equal(one[:, :, : a.length], two[:, :, : a.length])


@pytest.mark.parametrize("keep", range(1, len(WINDOW) + 1))
def test_every_prefix_equals_stepwise_decoding(model: Any, keep: int) -> None:
    base = prefilled(model)
    at_once, stepwise = base.fork(), base.fork()
    hidden = forward(model, WINDOW, at_once, keep)
    steps = [forward(model, [token], stepwise) for token in WINDOW[:keep]]
    assert mx.array_equal(hidden[:, :keep], mx.concatenate(steps, axis=1))
    assert at_once.length == len(PROMPT) + keep
    assert_same_state(at_once, stepwise)
    # What a rejection left behind in the buffers does not reach the next token.
    logits = [model.logits(forward(model, [NEXT], state)) for state in (at_once, stepwise)]
    assert mx.array_equal(*logits)
    assert mx.isfinite(logits[0]).all().item()


def test_prefixes_of_a_batch_with_rows_of_different_lengths(model: Any) -> None:
    prompts = [PROMPT, PROMPT[:2], PROMPT[1:5]]
    keeps = [4, 1, 6]
    together = [prefilled(model, prompt) for prompt in prompts]
    alone = [state.fork() for state in together]
    windows = [WINDOW, WINDOW[::-1], [1, 1, 2, 2, 3, 3]]
    _, captured = model.forward(mx.array(windows), together, keep_steps=True)
    captured.commit(together, keeps)
    for state, single, window, keep in zip(together, alone, windows, keeps, strict=True):
        forward(model, window, single, keep)
        assert_same_state(state, single)
    # And again, from where each of them is.
    hidden, captured = model.forward(mx.array([[NEXT]] * 3), together, keep_steps=True)
    captured.commit(together, [1, 1, 1])
    for row, single in enumerate(alone):
        assert mx.array_equal(hidden[row : row + 1], forward(model, [NEXT], single))


def test_many_cycles_of_partial_commits(model: Any) -> None:
    """Rejections on top of rejections: 6 cycles of growing and shrinking prefixes over a buffer full of leftovers."""
    cycled, stepwise = prefilled(model), prefilled(model)
    for turn, keep in enumerate([1, 3, 6, 2, 6, 1]):
        window = [(token * 5 + turn) % 16 for token in WINDOW]
        forward(model, window, cycled, keep)
        for token in window[:keep]:
            forward(model, [token], stepwise)
    assert_same_state(cycled, stepwise)


def test_committing_nothing_leaves_a_row_as_it_was(model: Any) -> None:
    state = prefilled(model)
    before = state.fork()
    forward(model, WINDOW, state, 0)
    assert_same_state(state, before)
    assert mx.array_equal(forward(model, [NEXT], state), forward(model, [NEXT], before))


def test_a_forward_moves_nothing_until_it_is_committed(model: Any) -> None:
    state = prefilled(model)
    before = state.fork()
    model.forward(mx.array([WINDOW]), [state], keep_steps=True)
    assert_same_state(state, before)


def layer(first: int, steps: int, taps: int = 3) -> CapturedLayer:
    window = mx.arange(taps + first + steps - 1).reshape(1, -1, 1)
    return CapturedLayer(window, [mx.full((1, 1, 1, 1), first + i) for i in range(steps)], first)


def test_windows_and_memories_of_each_prefix() -> None:
    """Window before: inputs 0 1 2; the tokens bring 3, 4, 5, 6. After two tokens it is 2 3 4."""
    verify = layer(first=1, steps=4)
    for tokens in (1, 2, 3, 4):
        state = verify.after(tokens, 0)
        assert state.window.flatten().tolist() == [tokens, tokens + 1, tokens + 2]
        assert state.memory.item() == tokens
    prefill = layer(first=4, steps=1)
    assert prefill.after(4, 0).window.flatten().tolist() == [4, 5, 6]
    with pytest.raises(IndexError, match="after 3 tokens was not kept, only from 4 on"):
        prefill.after(3, 0)


def test_a_commit_takes_each_rows_own_layer_states() -> None:
    window = mx.arange(10).reshape(2, 5, 1)
    captured = Captured(
        [CapturedLayer(window, [mx.array([10 * t, 10 * t + 1]).reshape(2, 1, 1, 1) for t in (1, 2)], 1)]
    )
    rows = [nano_model().new_state() for _ in range(2)]
    captured.commit(rows, [2, 1])
    assert [row.length for row in rows] == [2, 1]
    assert rows[0].recurrent[0].window.flatten().tolist() == [2, 3, 4]
    assert rows[1].recurrent[0].window.flatten().tolist() == [6, 7, 8]
    assert [row.recurrent[0].memory.item() for row in rows] == [20, 11]
