"""Kernels that write in place, as on a GPU: writes reach all that shares the memory, and need an evaluation."""

from __future__ import annotations

import io
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.kernels import attention_inputs
from selfdraft.kernels.portable import Kernel
from tests.support.plain_kernels import plain_kernels

__all__ = ["RealMemory", "is_evaluated", "overwrite"]


class RealMemory:
    """`plain_kernels`, but keys and values are written to memory, past MLX.

    On a GPU a kernel runs when something is evaluated that takes its output; `left_out` counts the calls of which
    nothing was, and which would therefore have written nothing.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        plain_kernels(patch)
        patch.setattr(Kernel, "prepared", lambda *given: None)
        patch.setattr(attention_inputs, "attention_inputs", self._write)
        self.calls = 0
        self._outputs: list[mx.array] = []

    def left_out(self) -> int:
        """Calls since the last look whose output is not evaluated by now."""
        outputs, self._outputs = self._outputs, []
        return sum(not is_evaluated(output) for output in outputs)

    def _write(self, *given: Any, **sizes: Any) -> mx.array:
        heads: Any = [sizes[name] for name in ("heads", "kv_heads", "size")]
        attention_inputs._prepared(given[0], given[1:4], *given[4:6], given[6:8], *heads)  # its checks
        q, *new = attention_inputs.attention_inputs_reference(*given, **sizes)
        mx.eval(q, new)
        for buffers, written in zip(given[4:6], new, strict=True):
            for buffer, each, start in zip(buffers, written, given[6].tolist(), strict=True):
                end = start + given[0].shape[1]
                assert end <= buffer.shape[2], "written behind the buffer"
                overwrite(buffer, start, each[:, :, start:end])
        output = q * 1
        self._outputs.append(output)
        self.calls += 1
        return output


def overwrite(buffer: mx.array, start: int, new: mx.array) -> None:
    """Write [1, heads, T, width] at `start` of a buffer's memory, whoever shares it."""
    raw = {2: mx.uint16, 4: mx.uint32}[buffer.dtype.size]
    mx.eval(buffer)
    shared, new = buffer.view(raw), new.view(raw)
    mx.eval(shared, new)
    np.array(shared, copy=False)[:, :, start : start + new.shape[2]] = np.array(new)


def is_evaluated(array: mx.array) -> bool:
    """Whether an array is computed, or being computed: nothing leads to it any more in the graph."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "->" not in graph.getvalue()
