"""The arrays of a boundary, cut into what it adds to the one before it, and joined again. Knows arrays, no tokens.

A `span` holds what grows with the tokens: keys and values of every attention layer, entries of the head's history. A
`moment` holds what is of the last token alone: recurrent states, what layers with a sliding window still see, and the
trunk's hidden. Both are flat, by name, as a file of tensors is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from ..engine import Boundary, Cut
from ..state import HeadOutputs, KeyValues, RecurrentState, RowState

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


def cut_moment(boundary: Boundary, *, head: bool) -> Arrays:
    """Recurrent states, windows and hidden, each array with memory of its own.

    Args:
        head: with what the head needs.
    """
    state = boundary.state
    moment = {"hidden": _owned(boundary.hidden)}
    for index, layer in enumerate(state.recurrent):
        moment[f"recurrent.{index}.window"] = _owned(layer.window)
        moment[f"recurrent.{index}.memory"] = _owned(layer.memory)
    moment |= _windows("attention", state.attention, state.length)
    if head:
        moment |= _windows("head", state.head, state.head_length)
        if state.head_outputs:
            newest = state.head_outputs.only_newest(state.head_length).outputs
            moment |= {f"head_output.{module}": _owned(output) for module, output in enumerate(newest)}
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
        _fill(layer, f"attention.{index}", spans, moment, state.length)
    if head:
        state.head_length = state.length - 1
        for index, layer in enumerate(state.head):
            _fill(layer, f"head.{index}", spans, moment, state.head_length)
        outputs = [moment[name] for name in sorted(moment) if name.startswith("head_output.")]
        state.head_outputs = HeadOutputs(state.head_length - 1, tuple(outputs)) if outputs else None
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
        if layer.window is None and layer.keys is not None and layer.values is not None:
            slices[f"{kind}.{index}.keys"] = _owned(layer.keys[:, :, start:end])
            slices[f"{kind}.{index}.values"] = _owned(layer.values[:, :, start:end])
    return slices


def _windows(kind: str, layers: Sequence[KeyValues], end: int) -> dict[str, mx.array]:
    """What queries from `end` on still see of layers with a sliding window."""
    slices = {}
    for index, layer in enumerate(layers):
        if layer.window is not None and layer.keys is not None and layer.values is not None:
            seen = slice(max(layer.begin(end) - layer.first, 0), end - layer.first)
            slices[f"{kind}.{index}.keys"] = _owned(layer.keys[:, :, seen])
            slices[f"{kind}.{index}.values"] = _owned(layer.values[:, :, seen])
    return slices


def _fill(layer: KeyValues, name: str, spans: Sequence[Arrays], moment: Arrays, end: int) -> None:
    """Give a layer its keys and values of the positions before `end`."""
    held = spans if layer.window is None else [moment]
    keys = [part[f"{name}.keys"] for part in held if f"{name}.keys" in part]
    values = [part[f"{name}.values"] for part in held if f"{name}.values" in part]
    if keys:
        layer.keys, layer.values = mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)
        layer.first = end - layer.keys.shape[2]


def _owned(x: mx.array) -> mx.array:
    """A copy with memory of its own: a slice may be a view, which keeps all of a row's buffer alive."""
    return mx.slice_update(mx.zeros(x.shape, dtype=x.dtype), x, mx.array([0]), (0,))
