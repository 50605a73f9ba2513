"""Measures acceptance on the 90 prompts the way the torch reference did, in a process of its own.

    python -m tests.support.measure_acceptance greedy|sampled OUTPUT

A process of its own may take OpenBLAS, which is five times faster in float32; bit parity is not the point here. Without
OpenBLAS the weights stay bf16, the faster choice then. Counting follows `definitions` of the fixture: every cycle has
the full depth, also the one that goes past `max_tokens`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from selfdraft.device import active_blas, choose_blas
from selfdraft.settings import load_settings

CONTINUATIONS = {"greedy": {"chat": 1, "prose": 1, "code": 1}, "sampled": {"chat": 2, "prose": 3, "code": 2}}
PROMPTS_AT_ONCE = 8


def main(mode: str, output: Path) -> None:
    choose_blas(load_settings().blas)
    import mlx.core as mx

    from tests.support.reference import prompts, reference_model

    exact = active_blas() != "reference"
    model = reference_model(dtype=mx.float32 if exact else None)
    continuations = []
    for start in range(0, len(prompts()), PROMPTS_AT_ONCE):
        continuations += measure(model, mode, start)
    output.write_text(json.dumps({"float32": exact, "continuations": continuations}))


def measure(model: Any, mode: str, start: int) -> list[dict[str, Any]]:
    """Continue a few prompts side by side."""
    from selfdraft.engine import RULES, Engine, Request
    from selfdraft.params import SamplingParams
    from tests.support.reference import acceptance_fixture, prompts

    fixture = acceptance_fixture()
    depth, most = fixture["depth"], fixture["max_tokens"]
    params = SamplingParams(depth=depth, max_tokens=most + depth + 1, **fixture[mode]["settings"]).resolved({})
    engine = Engine(model, rule=RULES["tokenwise"])
    rows = []
    for index, prompt in enumerate(prompts()[start : start + PROMPTS_AT_ONCE], start):
        request = Request(prompt.tokens, params, stop_ids=frozenset(fixture["stop_ids"]))
        first = Engine(model)
        body = first.add(request)
        while body.state.length < len(prompt.tokens) - 1:
            first.step()
        for copy in range(CONTINUATIONS[mode][prompt.kind]):
            row = engine.add(request)
            row.state = body.state.fork()  # continuations of a prompt share its prefill
            row.stream = (index, copy)  # unseeded, so that it accepts by rejection; but the same at every run
            rows.append((prompt, row))
    while engine.rows:
        engine.step()
        for _, row in rows:
            if row.error is not None:
                raise row.error
            if len(row.emitted) >= most and not row.done:
                engine.cancel(row)
    return [
        {
            "id": prompt.id,
            "kind": prompt.kind,
            "tokens": row.emitted[:most],
            "cycles": row.statistics.cycles,
            "tried": _padded(row.statistics.tried, depth),
            "accepted": _padded(row.statistics.accepted, depth),
        }
        for prompt, row in rows
    ]


def _padded(counts: list[int], depth: int) -> list[int]:
    return counts + [0] * (depth - len(counts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
