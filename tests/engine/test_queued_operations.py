"""Guards how many operations a cycle on a GPU queues beside the model's own: to queue one takes the host some 15 us,
which no faster device gives back.

Kernels and the model are stood in for by single nodes of MLX's graph; what does not launch anything is not counted.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.engine import RULES, Engine, Request
from selfdraft.engine.cycle import Cycle
from selfdraft.engine.row import Pending
from selfdraft.kernels import acceptance, draw, kept_logits, noise_keys, report, small_arrays
from selfdraft.kernels.portable import Call, Kernel, Launch
from selfdraft.kernels.self_check import SelfCheck
from tests.support.nano import nano_model
from tests.support.rows import params

VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unflatten"}
DEPTH = 3
MODEL_CALLS = 2 * DEPTH + 2


def one_node(shape: Sequence[int], dtype: mx.Dtype, inputs: Sequence[mx.array]) -> mx.array:
    """Stands for what one launch gives."""
    blank = mx.zeros(shape, dtype)
    mx.eval(blank)
    return mx.depends([blank], list(inputs))[0]


class OneNodeModel:
    """A model each call of which is one node, and that takes lengths from the device."""

    vocab_size, context_length, max_depth, width = 512, 4096, 8, 16

    def __init__(self) -> None:
        self.new_state = nano_model(vocab_size=16).new_state

    def forward(self, tokens: mx.array, rows: Any, *, keep_steps: bool, **lengths: Any) -> tuple[mx.array, Any]:
        captured = SimpleNamespace(commit_on_device=lambda *_: None)
        return one_node((*tokens.shape, self.width), mx.bfloat16, [tokens]), captured

    def logits(self, hidden: mx.array) -> mx.array:
        return one_node((*hidden.shape[:2], self.vocab_size), mx.bfloat16, [hidden])

    def draft_logits(self, hidden: mx.array, step: int = 0, *, whole: bool = False) -> mx.array:
        return self.logits(hidden)

    def draft(self, tokens: mx.array, hidden: mx.array, *_: Any, **lengths: Any) -> mx.array:
        return one_node((*tokens.shape, self.width), mx.bfloat16, [tokens, hidden])


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(kernel: Kernel, launch: Launch, dtypes: Sequence[mx.Dtype]) -> Call:
        def call(inputs: Sequence[mx.array]) -> list[mx.array]:
            assert [x.dtype for x in inputs] == list(dtypes), kernel.name
            blanks = [mx.zeros(shape, dtype) for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)]
            mx.eval(blanks)
            return mx.depends(blanks, list(inputs))

        return call

    monkeypatch.setattr(Kernel, "prepared", prepared)
    monkeypatch.setattr(SelfCheck, "passed", True)
    monkeypatch.setattr(small_arrays, "backend", lambda: "cuda")
    for module in (acceptance, draw, kept_logits, noise_keys, report):
        monkeypatch.setattr(module, "_CALLS", {})


def queued(cycle: Cycle, engine: Engine, **given: Any) -> Counter[str]:
    """Operations of the third cycle of a row in a stream of cycles that the host does not wait for, by name."""
    row = engine.add(Request([1, 2], params(max_tokens=99, depth=DEPTH, **given)))
    row.emitted, row.pending = [3], Pending(mx.zeros((1, 16), mx.bfloat16), [3])
    unread = None
    for _ in range(3):
        flight = cycle.launch([row], [DEPTH], unread)
        names = operations(flight.decision.arrays)
        mx.eval(flight.decision.arrays, flight.decision.report.tokens, flight.verified.hidden)
        unread = cycle._leave_unread(flight)
    return names


def operations(arrays: Sequence[mx.array]) -> Counter[str]:
    """Nodes of the graph behind arrays, but views."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    names = re.findall(r'\[label ="(\w+)", shape=rectangle\]', text.getvalue())
    return Counter(name for name in names if name not in VIEWS)


@pytest.mark.usefixtures("as_on_cuda")
def test_sampling_queues_few_operations_beside_the_model() -> None:
    model: Any = OneNodeModel()
    cycle = Cycle(model, RULES["block"])
    names = queued(cycle, Engine(model, cycle=cycle), temperature=0.6, top_p=0.95, top_k=20)
    assert names.total() - MODEL_CALLS <= 25, names
