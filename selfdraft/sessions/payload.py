"""The arrays of a boundary, cut into what it adds to the one before it, and joined again. Knows arrays, no tokens.

A `span` holds what grows with the tokens: keys and values of every attention layer, entries of the head's history. A
`moment` holds what is of the last token alone: recurrent states, what layers with a sliding window still see, and the
trunk's hidden. Both are flat, by name, as a file of tensors is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..engine import Boundary, Cut
from ..state import HeadOutputs, KeyValues, RecurrentState, RowState

__all__ = ["Arrays", "Payload", "cut_moment", "cut_span", "expanded", "join", "nbytes", "quantised"]

Arrays = Mapping[str, mx.array]

_PARTS = ("codes", "scales", "biases")
_GROUPS = (64, 32)


def cut_span(boundary: Boundary, start: int, *, head: bool) -> Arrays:
    """Keys and values of the tokens from `start` on, each array with memory of its own.

    Args:
        head: with the head's entries. That of pair i, (h_{i-1}, t_i), is entry i - 1, so they are one behind, and those
            of an MTP module that follows others still further.
    """
    state = boundary.state
    span: dict[str, mx.array] = {}
    for name, layer, behind in _layers(state, head):
        if layer.window is None:
            span |= _cut(name, layer, max(start - behind, 0), max(state.length - behind, 0))
    mx.eval(list(span.values()))
    return span


def cut_moment(boundary: Boundary, *, head: bool) -> Arrays:
    """Recurrent states, windows and hidden, each array with memory of its own.

    Args:
        head: with what the head needs.
    """
    state = boundary.state
    moment = {"hidden": _owned(boundary.hidden)}
    for index, recurrent in enumerate(state.recurrent):
        moment[f"recurrent.{index}.window"] = _owned(recurrent.window)
        moment[f"recurrent.{index}.memory"] = _owned(recurrent.memory)
    for name, layer, behind in _layers(state, head):
        if layer.window is not None:
            end = max(state.length - behind, 0)
            moment |= _cut(name, layer, max(layer.begin(end), layer.first), end)  # what queries from `end` on see
    if head and state.head_outputs:
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
    for name, layer, behind in _layers(state, head):
        _fill(layer, name, spans, moment, max(state.length - behind, 0))
    if head:
        state.head_length = state.length - 1
        outputs = [moment[name] for name in sorted(moment) if name.startswith("head_output.")]
        state.head_outputs = HeadOutputs(state.head_length - 1, tuple(outputs)) if outputs else None
    state.recurrent = [
        RecurrentState(moment[f"recurrent.{index}.window"], moment[f"recurrent.{index}.memory"])
        for index in range(len(state.recurrent))
    ]
    return Boundary(state, moment["hidden"], cuts)


@dataclass(frozen=True)
class Payload:
    """How boundaries are taken apart and put together: where several processes hold a row, all of them do it."""

    cut_span: Callable[..., Arrays] = cut_span
    cut_moment: Callable[..., Arrays] = cut_moment
    join: Callable[..., Boundary] = join


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


def _layers(state: RowState, head: bool) -> list[tuple[str, KeyValues, int]]:
    """Each layer with its name, and how many entries fewer than tokens it has."""
    layers = [(f"attention.{index}", layer, 0) for index, layer in enumerate(state.attention)]
    if head:
        modules = zip(state.head, state.shape.head, strict=True)
        layers += [(f"head.{index}", layer, 1 + shape.behind) for index, (layer, shape) in enumerate(modules)]
    return layers


def _cut(name: str, layer: KeyValues, start: int, end: int) -> dict[str, mx.array]:
    """What a layer has of these positions; nothing if it was never written."""
    if layer.keys is None or layer.values is None:
        return {}
    places = slice(start - layer.first, end - layer.first)
    return {f"{name}.keys": _owned(layer.keys[:, :, places]), f"{name}.values": _owned(layer.values[:, :, places])}


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
