"""The arrays of a boundary, cut into what it adds to the one before it, and joined again. Knows arrays, no tokens.

A `span` holds what grows with the tokens: keys and values of every attention layer, entries of the head's history. A
`moment` holds what is of the last token alone: recurrent states and the trunk's hidden. Both are flat, by name, as a
file of tensors is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from ..engine import Boundary, Cut
from ..state import KeyValues, RecurrentState, RowState

__all__ = ["Arrays", "cut_moment", "cut_span", "expanded", "join", "nbytes", "quantised"]

Arrays = Mapping[str, mx.array]

_PARTS = ("codes", "scales", "biases")
_GROUPS = (64, 32)


def cut_span(boundary: Boundary, start: int, *, head: bool) -> Arrays:
    """Keys and values of the tokens from `start` on, each array with memory of its own.

    Args:
        head: with the head's entries. That of pair i, (h_{i-1}, t_i), is entry i - 1, so they are one behind.
    """
    state = boundary.state
    span = _slices("attention", state.attention, start, state.length)
    if head:
        span |= _slices("head", state.head, max(start - 1, 0), state.length - 1)
    mx.eval(list(span.values()))
    return span


def cut_moment(boundary: Boundary) -> Arrays:
    """Recurrent states and hidden, each array with memory of its own."""
    moment = {"hidden": _owned(boundary.hidden)}
    for index, layer in enumerate(boundary.state.recurrent):
        moment[f"recurrent.{index}.window"] = _owned(layer.window)
        moment[f"recurrent.{index}.memory"] = _owned(layer.memory)
    mx.eval(list(moment.values()))
    return moment


def join(empty: RowState, spans: Sequence[Arrays], moment: Arrays, cuts: tuple[Cut, ...], *, head: bool) -> Boundary:
    """The boundary behind the last of consecutive spans.

    Args:
        empty: a state that has seen nothing; it becomes the boundary's.
        cuts: see `Boundary`; the last says where it ends.
        head: the spans hold the head's history.
    """
    state = empty
    state.length = cuts[-1].end
    for index, layer in enumerate(state.attention):
        _fill(layer, f"attention.{index}", spans)
    if head:
        state.head_length = state.length - 1
        for index, layer in enumerate(state.head):
            _fill(layer, f"head.{index}", spans)
    state.recurrent = [
        RecurrentState(moment[f"recurrent.{index}.window"], moment[f"recurrent.{index}.memory"])
        for index in range(len(state.recurrent))
    ]
    return Boundary(state, moment["hidden"], cuts)


def nbytes(arrays: Arrays | None) -> int:
    """Bytes of the arrays."""
    return sum(array.nbytes for array in arrays.values()) if arrays else 0


def quantised(span: Arrays, bits: int) -> Arrays:
    """A span in fewer bits, affine in groups along the head size; arrays that no group divides stay as they are."""
    small: dict[str, mx.array] = {}
    for name, array in span.items():
        group = next((size for size in _GROUPS if array.shape[-1] % size == 0), None)
        if group is None or not array.size:
            small[name] = array
        else:
            parts = mx.quantize(array, group_size=group, bits=bits)
            small |= {f"{name}.{part}@{group}.{bits}": each for part, each in zip(_PARTS, parts, strict=True)}
    mx.eval(list(small.values()))
    return small


def expanded(span: Arrays) -> dict[str, mx.array]:
    """What `quantised` made smaller, in its former shapes and dtypes.

    Raises:
        ValueError, KeyError: it is nothing that `quantised` made.
    """
    whole: dict[str, mx.array] = {}
    for name, array in span.items():
        stem, at, form = name.partition("@")
        if not at:
            whole[name] = array
        elif stem.endswith(f".{_PARTS[0]}"):
            stem = stem.removesuffix(f".{_PARTS[0]}")
            group, bits = (int(number) for number in form.split("."))
            codes, scales, biases = (span[f"{stem}.{part}@{form}"] for part in _PARTS)
            whole[stem] = mx.dequantize(codes, scales, biases, group_size=group, bits=bits)
    return whole


def _slices(kind: str, layers: Sequence[KeyValues], start: int, end: int) -> dict[str, mx.array]:
    slices = {}
    for index, layer in enumerate(layers):
        if layer.keys is not None and layer.values is not None:
            slices[f"{kind}.{index}.keys"] = _owned(layer.keys[:, :, start:end])
            slices[f"{kind}.{index}.values"] = _owned(layer.values[:, :, start:end])
    return slices


def _fill(layer: KeyValues, name: str, spans: Sequence[Arrays]) -> None:
    keys = [span[f"{name}.keys"] for span in spans if f"{name}.keys" in span]
    values = [span[f"{name}.values"] for span in spans if f"{name}.values" in span]
    if keys:
        layer.keys, layer.values = mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)


def _owned(x: mx.array) -> mx.array:
    """A copy with memory of its own: a slice may be a view, which keeps all of a row's buffer alive."""
    return mx.slice_update(mx.zeros(x.shape, dtype=x.dtype), x, mx.array([0]), (0,))
