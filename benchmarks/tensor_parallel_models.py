"""The models of `tensor_parallel.py` on one rank, and how they are driven. Imports MLX."""

from __future__ import annotations

import sys
import time
from typing import Any

import mlx.core as mx
from socket_bytes import tcp_bytes

from selfdraft.device import choose_dtype
from selfdraft.engine import Engine, Request, Row
from selfdraft.kernels.portable import backend
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import LoadedModel, build_model
from selfdraft.models.probe import PROBE_TEXT
from selfdraft.params import SamplingParams
from selfdraft.source import find_model
from selfdraft.text import Tokenizer
from selfdraft.tuning.synthetic import synthetic

__all__ = ["Bench", "built"]

WARM = 12  # tokens that do not count
PROMPT = Tokenizer.from_folder(find_model("reference")).encode(PROBE_TEXT, special=False)


def built(name: str, group: Any) -> LoadedModel:
    """The reference model, or a synthetic one, or this rank's part of it."""
    if name != "reference":
        return synthetic(name, ranks=group)
    checkpoint = classify(find_model(name))
    dtype = choose_dtype("auto", quantised=checkpoint.quantised)
    return build_model(checkpoint, with_head=True, dtype=dtype, ranks=group)


class Bench:
    """Decodes with one model, and counts."""

    def __init__(self, model: Any, leader: Any) -> None:
        self._model = model
        self._leader = leader

    def decode(self, setting: Any, tokens: int) -> dict[str, Any]:
        """Figures of one row, behind its first tokens."""
        if not self._leader:
            self._model.looks_ahead = setting.looks_ahead
        self._run(setting, 2 * WARM)  # compiles
        engine = Engine(self._model)
        row = self._row(engine, setting, WARM + tokens)
        while len(row.emitted) < WARM:
            engine.step()
        before, skipped, cycles = self._counts(), len(row.emitted), row.statistics.cycles
        begin = time.perf_counter()
        while not row.done:
            engine.step()
        seconds = time.perf_counter() - begin
        emitted, cycles = len(row.emitted) - skipped, row.statistics.cycles - cycles
        if row.error:
            raise row.error
        return {
            "tokens_per_second": emitted / seconds,
            "milliseconds_a_cycle": 1000 * seconds / cycles,
            "tokens_a_cycle": emitted / cycles,
            "wire": {name: (count - before[name]) / emitted for name, count in self._counts().items()},
            "ids": " ".join(map(str, row.emitted)),
        }

    def _run(self, setting: Any, tokens: int) -> None:
        engine = Engine(self._model)
        row = self._row(engine, setting, tokens)
        while not row.done:
            engine.step()

    def _row(self, engine: Engine, setting: Any, tokens: int) -> Row:
        sampling: Any = dict(setting.sampling)
        params = SamplingParams(max_tokens=tokens, depth=setting.depth, ignore_eos=True, **sampling)
        return engine.add(Request([token % self._model.vocab_size for token in PROMPT], params.resolved({})))

    def _counts(self) -> dict[str, float]:
        """What passed between the ranks so far; a token each in the end."""
        if not self._leader:
            return {}
        group = self._leader.group
        counts: dict[str, float] = {"control": self._leader.control_bytes}
        if not backend():  # where a forward is compiled, its messages are built once and sent often
            counts |= {"messages": group.collectives, "message_bytes": group.bytes}
        if group.backend == "ring" and sys.platform == "linux":
            mx.synchronize()
            time.sleep(0.2)  # acknowledgements on their way
            sent, received = tcp_bytes()
            counts |= {"tcp_sent": sent, "tcp_received": received}
        return counts
