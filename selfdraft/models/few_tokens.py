"""A forward of few tokens as one function of arrays, whose graph is built once a shape: compiled where there is a GPU.

Knows layers that have `attend_few` or `recur_few`, and what rows remember; no embeddings, norms or heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..kernels.gated_delta_tape import Tape
from ..kernels.portable import backend
from ..kernels.small_arrays import fresh, moved, numbers
from ..state import CapturedLayer, KeyValues, RecurrentState

__all__ = ["FewTokens"]

# MLX's custom kernels write into arrays that it takes for unchanged; see `Kernel.updates`.
_Buffers = list[list[tuple[mx.array, mx.array]]]


class FewTokens:
    """Layers one after the other.

    Args:
        layers: decoder layers that are joined (see `use_few_row_kernels`).
        before: from the inputs to what the first layer takes, [B, T, H]. after: what is made of the last one's output.
    """

    def __init__(
        self, layers: Sequence[Any], before: Callable[..., mx.array], after: Callable[[mx.array], mx.array]
    ) -> None:
        self._layers = list(layers)
        self._before, self._after = before, after
        self._run: Callable[..., Any] = mx.compile(self._forward) if backend() else self._forward
        self._fitting: dict[tuple[int, int, int, mx.Dtype], bool] = {}

    def fits(self, shape: tuple[int, ...], states: Sequence[RecurrentState], dtype: mx.Dtype) -> bool:
        """Whether kernels take tokens of a shape [B, T] behind such states, of all recurrent layers."""
        tape, (rows, tokens) = states[0].tape if states else None, shape
        key = rows, tokens, tape.steps if tape else 0, dtype
        if key not in self._fitting:
            self._fitting[key] = _of_one_dtype(self._layers, dtype) and all(
                layer.linear_attn.few_fits(rows, tokens, tape, dtype)
                if "linear_attn" in layer
                else layer.self_attn.few_fits(rows, tokens, dtype)
                for layer in self._layers
            )
        return self._fitting[key]

    def __call__(
        self,
        inputs: Sequence[mx.array],
        states: Sequence[RecurrentState],
        buffers: Sequence[Sequence[KeyValues]],
        offsets: Sequence[int],
        rope_deltas: Sequence[int],
        tokens: int,
        dtype: mx.Dtype,
        shift: mx.array | None = None,
        most: int = 0,
    ) -> tuple[mx.array, list[CapturedLayer]]:
        """The layers' output, after `after`, and what the recurrent ones leave.

        Args:
            inputs: of `before`.
            states: of the recurrent layers. buffers: of the attention layers, one a row each.
            offsets: where each row's new tokens go. rope_deltas: see `RowState.rope_delta`.
            tokens, dtype: T, and that of keys and values.
            shift, most: see `Model.forward`.
        """
        places = []
        for layer, rows in zip((x for x in self._layers if "linear_attn" not in x), buffers, strict=True):
            args = layer.self_attn.args
            size = args.kv_heads, args.head_dim, dtype
            places.append([row.writable(at + most + tokens, *size) for row, at in zip(rows, offsets, strict=True)])
        starts = fresh(list(offsets))
        if shift is not None:
            starts = starts + shift
        counts = states[0].counts if states else starts
        held = [state.arrays() for state in states]
        out, left = self._run(list(inputs), counts, starts, numbers(tuple(rope_deltas)), held, places, tokens)
        if not states:  # nobody may ever want what a head puts out, but what it wrote: that comes with the buffers
            for rows, written in zip(buffers, places, strict=True):
                for row, pair in zip(rows, written, strict=True):
                    row.keys, row.values = mx.depends(list(pair), [out])
        sizes = states[0].base.shape[1:] if states else ()
        return out, [CapturedLayer(window, [memory], first=1, tape=Tape(tape, sizes)) for window, memory, tape in left]

    def _forward(
        self,
        inputs: list[mx.array],
        counts: mx.array,
        starts: mx.array,
        rope_deltas: mx.array,
        held: list[tuple[mx.array, ...]],
        places: _Buffers,
        tokens: int,
    ) -> tuple[mx.array, list[tuple[mx.array, ...]]]:
        x = self._before(*inputs)
        rows = starts.shape[0]
        counts, starts = moved(counts)[:rows], moved(starts)
        ends = starts + tokens
        states, buffers = iter(held), iter(places)
        left: list[tuple[mx.array, ...]] = []
        normed = self._layers[0].input_layernorm(x) if self._layers else None
        for layer, then in zip(self._layers, [*self._layers, None][1:], strict=True):
            following = None if then is None else then.entrance
            if "linear_attn" in layer:
                window, memory, *tape = next(states)
                state = RecurrentState(window, memory, Tape(tape[0], memory.shape[1:]) if tape else None)
                x, normed, kept = layer.recur_few(x, normed, state, counts, following)
                assert kept.tape is not None
                left.append((kept.window, kept.memories[0], kept.tape.array))
            else:
                x, normed = layer.attend_few(x, normed, next(buffers), starts, rope_deltas, ends, following)
        return self._after(x), left


def _of_one_dtype(layers: Sequence[Any], dtype: mx.Dtype) -> bool:
    """Whether activations keep a dtype through the layers: a kernel takes no other beside it, but where it says so."""
    named: list[Any] = [each for layer in layers for each in tree_flatten(layer.parameters())]
    decisive = [x.dtype for name, x in named if not name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))]
    return all(each == dtype for each in decisive if mx.issubdtype(each, mx.floating))
