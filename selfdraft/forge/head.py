"""The head of a package: measured dense, rounded and calibrated, on the trunk as it was built; what pays is kept.

A head more precise than its trunk may draft worse, and one that is merely rounded may draft hardly at all; so nothing
is taken for granted. The trunk's own answers are the text: what a head drafts is what its trunk says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..engine import Engine, Request
from ..files import write_atomically
from ..llm import LLM
from ..models.checkpoint import HEAD
from ..params import SamplingParams
from ..settings import load_settings
from .gptq import calibrated
from .inputs import Grams, recorded
from .plan import HEAD_FILE, Plan
from .recipe import Recipe
from .tensor_file import TensorWriter, bytes_of, entry_of
from .texts import CALIBRATION, HELD_OUT

__all__ = ["HeadOutcome", "make_head"]

BITS = 4
DEPTH = 4  # deepest draft that is measured
TOKENS = 96  # of an answer
WITHIN = 0.02  # tokens a cycle, as a share, that fewer bits may cost in "auto"

Progress = Callable[[str, int, int], None]
Stored = dict[str, mx.array]

# The projection of embedding and hidden is small and sums two scales; routers decide which experts run.
_STAYS = ("fc", "eh_proj", "gate", "gate.gate", "shared_expert_gate")


@dataclass(frozen=True)
class HeadOutcome:
    """What became of a head.

    Attributes:
        kept: "dense", "4bit" or "4bit-naive".
        acceptance: way to store it -> share of drafts accepted at depth 1, 2, ..., given those before, greedily.
        tokens_per_cycle: likewise.
        nbytes: likewise, of the head's tensors.
    """

    kept: str
    acceptance: dict[str, list[float]]
    tokens_per_cycle: dict[str, float]
    nbytes: dict[str, int]

    def describe(self) -> dict[str, Any]:
        """For `selfdraft.json`."""
        return {
            "kept": self.kept,
            "acceptance": {name: [round(rate, 4) for rate in rates] for name, rates in self.acceptance.items()},
            "tokens_per_cycle": {name: round(tokens, 3) for name, tokens in self.tokens_per_cycle.items()},
            "bytes": self.nbytes,
            "measured_on": f"{len(HELD_OUT)} prompts x {TOKENS} tokens, greedy; calibrated on {len(CALIBRATION)}",
        }


def make_head(work: Path, wanted: Plan, recipe: Recipe, progress: Progress) -> HeadOutcome | None:
    """Choose how the head is stored, and write it so.

    Args:
        work: a package whose head is dense.

    Returns:
        None if the recipe wants it dense, which needs no measuring, or there are no layers to quantise.
    """
    if recipe.head == "dense":
        return None
    llm = LLM.open(work.name, work, load_settings(session_cache_max_bytes=0))
    head = _head_of(llm)
    layers = _quantisable(head, recipe.group_size)
    if not layers:
        return None
    with recorded(head, lambda path: path in layers) as grams:
        _decode(llm, CALIBRATION, 0.7, lambda done: progress("calibration", done, len(CALIBRATION)))
    dense = _tensors(head)
    ways = {
        "dense": dense,
        "4bit-naive": _quantised(head, layers, recipe, None),
        "4bit": _quantised(head, layers, recipe, grams),
    }
    acceptance, per_cycle = {}, {}
    for number, (name, tensors) in enumerate(ways.items()):
        _put_in(head, tensors, layers, recipe)
        start = number * len(HELD_OUT)
        tell = partial(_tell, progress, start)
        acceptance[name], per_cycle[name] = _decode(llm, HELD_OUT, 0, tell)
    kept = recipe.head if recipe.head != "auto" else _best(per_cycle)
    _write(work, wanted, ways[kept])
    return HeadOutcome(kept, acceptance, per_cycle, {name: _nbytes(tensors) for name, tensors in ways.items()})


def _tell(progress: Progress, start: int, done: int) -> None:
    progress("acceptance", start + done, 3 * len(HELD_OUT))


def _best(per_cycle: dict[str, float]) -> str:
    """The calibrated codes unless they draft clearly worse: fewer bytes are read at every draft."""
    return "4bit" if per_cycle["4bit"] >= (1 - WITHIN) * per_cycle["dense"] else "dense"


def _head_of(llm: LLM) -> nn.Module:
    model: Any = llm.loaded.model
    head: nn.Module = model.mtp
    return head


def _quantisable(head: nn.Module, group_size: int) -> list[str]:
    found = []
    for path, layer in head.named_modules():
        if hasattr(layer, "to_quantized") and not path.endswith(_STAYS) and layer.weight.shape[-1] % group_size == 0:
            found.append(path)
    return found


def _tensors(head: nn.Module) -> Stored:
    return {f"{HEAD}{name}": tensor for name, tensor in dict(tree_flatten(head.parameters())).items()}


def _quantised(head: nn.Module, layers: Sequence[str], recipe: Recipe, grams: Grams | None) -> Stored:
    """The head's tensors with some layers in codes: rounded, or calibrated by what they were fed."""
    dtype = getattr(mx, recipe.dtype)
    found = _tensors(head)
    for path in layers:
        weight = found[f"{HEAD}{path}.weight"]
        if grams is None or path not in grams:
            codes, scales, biases = mx.quantize(weight.astype(dtype), group_size=recipe.group_size, bits=BITS)
        else:
            settings: dict[str, Any] = {"bits": BITS, "group_size": recipe.group_size, "dtype": dtype}
            codes, scales, biases = calibrated(weight, grams[path], **settings)
        found |= {f"{HEAD}{path}.weight": codes, f"{HEAD}{path}.scales": scales, f"{HEAD}{path}.biases": biases}
    mx.eval(found)
    return found


def _put_in(head: nn.Module, tensors: Stored, layers: Sequence[str], recipe: Recipe) -> None:
    """Let the head compute with such tensors; those that were dense stay so."""
    coded = {path for path in layers if f"{HEAD}{path}.scales" in tensors}
    if coded:
        plain = {
            path: layer for path, layer in head.named_modules() if path in coded and hasattr(layer, "to_quantized")
        }
        if plain:
            nn.quantize(head, group_size=recipe.group_size, bits=BITS, class_predicate=lambda path, _: path in plain)
    head.load_weights([(name.removeprefix(HEAD), tensor) for name, tensor in tensors.items()])
    mx.eval(head.parameters())


def _decode(
    llm: LLM, texts: Sequence[str], temperature: float, tell: Callable[[int], None]
) -> tuple[list[float], float]:
    """Answer prompts. Returns acceptance by depth, and tokens a cycle."""
    depth = min(llm.max_depth, DEPTH)
    asked = SamplingParams(depth=depth, max_tokens=TOKENS, temperature=temperature, seed=1, ignore_eos=True).resolved(
        {}
    )
    engine = Engine(llm.loaded.model)
    tried, accepted, tokens, cycles = np.zeros(depth), np.zeros(depth), 0, 0
    for done, text in enumerate(texts, start=1):
        row = engine.add(Request(llm.tokens(text, raw=llm.template is None), asked))
        for _ in engine.run(row):
            pass
        counts = row.statistics
        tried[: len(counts.tried)] += counts.tried
        accepted[: len(counts.accepted)] += counts.accepted
        cycles += counts.cycles
        tokens += sum(counts.emitted.values()) - counts.emitted["prefill"]
        tell(done)
    return (accepted / np.maximum(tried, 1)).tolist(), tokens / max(cycles, 1)


def _nbytes(tensors: Stored) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _write(work: Path, wanted: Plan, tensors: Stored) -> None:
    """Replace the head's file, and what the index says of it."""
    entries = [entry_of(name, tensor.dtype, tensor.shape) for name, tensor in sorted(tensors.items())]
    with TensorWriter(work / HEAD_FILE, entries, {"format": "mlx"}) as file:
        for entry in entries:
            file.write(entry.name, [bytes_of(tensors[entry.name])])
    path = work / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: where for name, where in index["weight_map"].items() if where != HEAD_FILE}
    index["weight_map"] = dict(sorted((kept | {entry.name: HEAD_FILE for entry in entries}).items()))
    write_atomically(path, json.dumps(index, indent=1))
