"""Fresh forwards of the tokens of a boundary, cut as it says, and the comparison bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from selfdraft.engine import Boundary, Cut, Inputs
from selfdraft.models.base import Model
from selfdraft.sessions import PromptSession, SessionBank
from selfdraft.state import RowState

__all__ = ["CutsOnly", "Known", "differences", "replay", "same"]

# State and last hidden by tokens, cuts, and whether the head was primed.
Known = dict[tuple[tuple[int, ...], tuple[Cut, ...], bool], tuple[RowState, mx.array]]


def replay(
    model: Model,
    tokens: Sequence[int],
    cuts: Sequence[Cut],
    *,
    head: bool,
    known: Known | None = None,
    inputs: Inputs | None = None,
) -> Boundary:
    """Forward tokens from nothing, with the cuts of a boundary; the head is primed pair by pair.

    Args:
        known: replays of this model, which go on from one another where they begin alike.
        inputs: what the tokens have beside ids, made ready.
    """
    known = {} if known is None else known
    state, last = model.new_state(), mx.zeros((1, 0))
    for count, cut in enumerate(cuts, start=1):
        key = tuple(tokens[: cut.end]), tuple(cuts[:count]), head
        if key not in known:
            known[key] = _forward(model, tokens[: cut.end], state, last, chunk=cut.chunk, head=head, inputs=inputs)
        before, last = known[key]
        state = before.fork()
    return Boundary(state, last, tuple(cuts))


def _forward(
    model: Model,
    tokens: Sequence[int],
    state: RowState,
    last: mx.array,
    *,
    chunk: bool,
    head: bool,
    inputs: Inputs | None,
) -> tuple[RowState, mx.array]:
    """Go on behind a state, the hidden of whose last token is given."""
    begin, hiddens = state.length, [last[:, None]] if state.length else []
    width = len(tokens) - begin if chunk else 1
    for start in range(begin, len(tokens), width):
        ids, beside = mx.array([list(tokens[start : start + width])]), {}
        if inputs is not None:
            state.rope_delta, beside = inputs.rope_delta(start), inputs.trunk(start, start + width)
        hidden, captured = model.forward(ids, [state], keep_steps=not chunk, **beside)
        captured.commit([state], [width])
        hiddens.append(hidden)
        mx.eval(hidden, state.arrays())
    hidden = mx.concatenate(hiddens, axis=1)
    if head:
        first = max(begin - 1, 0)
        # Beside pictures positions are turned by other operations: as wide as a prefill does it, then.
        pairs = len(tokens) - 1 - first if chunk and inputs is not None else 1
        for entry in range(first, len(tokens) - 1, max(pairs, 1)):
            ids, beside = mx.array([list(tokens[entry + 1 : entry + 1 + pairs])]), {}
            if inputs is not None:
                state.rope_delta = inputs.rope_delta(entry + 1)
                beside = inputs.head(entry + 1, entry + 1 + pairs)
            model.draft(ids, hidden[:, entry - first : entry - first + pairs], [state], [entry], **beside)
        state.head_length = len(tokens) - 1
        mx.eval(state.arrays())
    return state, hidden[:, -1]


def same(a: mx.array, b: mx.array) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and np.array_equal(np.array(a.view(mx.uint8)), np.array(b.view(mx.uint8)))


def differences(model: Model, a: Boundary, b: Boundary) -> list[str]:
    """What two boundaries do not share, bit for bit: of everything a row goes on from, and the next logits."""
    found = []
    if (a.state.length, a.state.head_length) != (b.state.length, b.state.head_length):
        found.append(f"lengths {a.state.length, a.state.head_length} and {b.state.length, b.state.head_length}")
    parts: list[tuple[str, mx.array, mx.array]] = [("hidden", a.hidden, b.hidden)]
    parts.append(("logits", model.logits(a.hidden), model.logits(b.hidden)))
    for index, (x, y) in enumerate(zip(a.state.recurrent, b.state.recurrent, strict=True)):
        parts += [(f"window {index}", x.window, y.window), (f"memory {index}", x.memory, y.memory)]
    for name, (x, y) in _layers(a.state, b.state).items():
        parts += [(f"keys of {name}", x[0], y[0]), (f"values of {name}", x[1], y[1])]
    if a.state.head_outputs and b.state.head_outputs:
        newest = [each.state.head_outputs.only_newest(each.state.head_length).outputs for each in (a, b)]
        parts += [(f"output of module {index}", *pair) for index, pair in enumerate(zip(*newest, strict=True))]
    mx.eval([array for _, *pair in parts for array in pair])
    return found + [name for name, x, y in parts if not same(x, y)]


def _layers(a: RowState, b: RowState) -> dict[str, list[tuple[mx.array, mx.array]]]:
    """Keys and values that coming queries see, of both states by the names of their layers."""
    ends = [(f"attention {index}", a.attention, b.attention, index, a.length) for index in range(len(a.attention))]
    for index, shape in enumerate(a.shape.head):
        ends.append((f"head {index}", a.head, b.head, index, a.head_length - shape.behind))
    found = {}
    for name, *both, index, end in ends:
        if end > 0:
            layers = [layers[index] for layers in both]
            seen = [slice(layer.begin(end) - layer.first, end - layer.first) for layer in layers]
            found[name] = [(x.keys[:, :, s], x.values[:, :, s]) for x, s in zip(layers, seen, strict=True)]
    return found


class CutsOnly(PromptSession):
    """A session that goes on from a given boundary and keeps nothing: a fresh run with the same cuts."""

    def __init__(self, prompt: Sequence[int], stops: Sequence[int], known: Boundary | None) -> None:
        super().__init__(SessionBank(lambda: None, 0), "", prompt, stops)  # type: ignore[arg-type, return-value]
        self._known = known

    def resume(self, length: int, *, drafts: bool) -> Boundary | None:
        return self._known if self._known is not None and self._known.state.length > length else None

    def keep(self, tokens: Sequence[int], boundary: Boundary) -> Any:
        return None
