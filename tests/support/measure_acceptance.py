"""Measures acceptance on the 90 prompts the way the torch reference did, in a process of its own.

    python -m tests.support.measure_acceptance OUTPUT

A process of its own may take OpenBLAS, which is five times faster in float32; bit parity is not the point here. Without
it, greedy decoding stays float32 (bf16 turns close calls: 18 of 90 texts differ); sampling takes bf16, where it is the
faster one. Greedy texts are compared token by token, so every third prompt is enough of them. Counting follows
`definitions` of the fixture: every cycle has the full depth, also the one that goes past `max_tokens`.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfdraft.device import active_blas, choose_blas
from selfdraft.settings import load_settings

if TYPE_CHECKING:
    from selfdraft.engine import Row
    from tests.support.reference import Prompt

CONTINUATIONS = {"greedy": 1, "sampled": 2}
PROMPTS_AT_ONCE = 8


def main(output: Path) -> None:
    choose_blas(load_settings().blas)
    import mlx.core as mx

    from tests.support.reference import prefilled, prompts, reference_model

    if active_blas() == "reference":
        passes = [(mx.float32, ("greedy",)), (mx.bfloat16, ("sampled",))]
    else:
        passes = [(mx.float32, ("greedy", "sampled"))]
    taken = {"greedy": prompts()[::3], "sampled": prompts()}
    found: dict[str, list[dict[str, Any]]] = {"greedy": [], "sampled": []}
    for dtype, modes in passes:
        model = reference_model(dtype=dtype)
        chosen = [prompt for prompt in prompts() if any(prompt in taken[mode] for mode in modes)]
        for start in range(0, len(chosen), PROMPTS_AT_ONCE):
            begun = [(prompt, prefilled(model, prompt.tokens)) for prompt in chosen[start : start + PROMPTS_AT_ONCE]]
            for mode in modes:
                found[mode] += measure(model, mode, [each for each in begun if each[0] in taken[mode]])
    output.write_text(json.dumps(found))


def measure(model: Any, mode: str, begun: Sequence[tuple[Prompt, Row]]) -> list[dict[str, Any]]:
    """Continue a few prompts side by side; all continuations of one share its prefill."""
    from selfdraft.engine import RULES, Engine, Request
    from selfdraft.params import SamplingParams
    from tests.support.reference import acceptance_fixture, go_on

    fixture = acceptance_fixture()
    depth, most = fixture["depth"], fixture["max_tokens"]
    params = SamplingParams(depth=depth, max_tokens=most + depth + 1, **fixture[mode]["settings"]).resolved({})
    engine = Engine(model, rule=RULES["tokenwise"])
    rows = []
    for prompt, first in begun:
        request = Request(prompt.tokens, params, stop_ids=frozenset(fixture["stop_ids"]))
        for copy in range(CONTINUATIONS[mode]):
            row = engine.add(request)
            go_on(row, first)
            # Unseeded, so that it accepts by rejection; but the same at every run.
            row.stream = (zlib.crc32(prompt.id.encode()), copy)
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
    main(Path(sys.argv[1]))
