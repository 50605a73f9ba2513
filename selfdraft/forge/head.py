"""The head of a package: measured dense, rounded and calibrated, on the trunk as it was built; what pays is kept.

A head more precise than its trunk may draft worse, and one that is merely rounded may draft hardly at all; so nothing
is taken for granted. The trunk's own answers are the text: what a head drafts is what its trunk says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..files import write_atomically
from ..llm import LLM
from ..models.checkpoint import HEAD
from ..settings import load_settings
from .acceptance import TEMPERATURE, Acceptance, answers, measure
from .gptq import calibrated
from .inputs import Inputs, recorded
from .plan import HEAD_FILE, Plan
from .recipe import Recipe
from .tensor_file import TensorWriter, bytes_of, entry_of
from .texts import CALIBRATION, HELD_OUT

__all__ = ["HeadOutcome", "make_head"]

BITS = 4
DEPTH = 4  # deepest draft that is measured
TOKENS = 96  # a prompt
WITHIN = 0.02  # of the tokens of a cycle: what codes may cost, since fewer bytes are read at every draft

DENSE, NAIVE, CALIBRATED = "dense", "4bit-naive", "4bit"

Progress = Callable[[str, int, int], None]
Stored = dict[str, mx.array]

# The projection of embedding and hidden is small and sums two scales; routers decide which experts run.
_STAYS = ("fc", "eh_proj", "pre_projection", "gate", "gate.gate", "shared_expert_gate")


@dataclass(frozen=True)
class HeadOutcome:
    """What became of a head.

    Attributes:
        kept: "dense", "4bit" or "4bit-naive".
        acceptance: what was measured, by way to store it.
        nbytes: likewise, of the head's tensors.
        texts: how many were measured on.
    """

    kept: str
    acceptance: Mapping[str, Acceptance]
    nbytes: Mapping[str, int]
    texts: int

    def over_calibrated(self, way: str) -> tuple[float, float]:
        """How many more tokens a cycle has than with the calibrated head, and the standard error of that."""
        return self.acceptance[way].over(self.acceptance[CALIBRATED])

    def describe(self) -> dict[str, Any]:
        """For `selfdraft.json`."""
        ways = {}
        for way, found in self.acceptance.items():
            more, error = self.over_calibrated(way)
            ways[way] = {
                "acceptance": [round(rate, 4) for rate in found.by_depth],
                "tokens_per_cycle": round(found.tokens_per_cycle, 3),
                "over_calibrated": {"tokens_per_cycle": round(more, 3), "standard_error": round(error, 3)},
                "bytes": self.nbytes[way],
            }
        on = (
            f"{self.texts} answers of the trunk to {len(HELD_OUT)} prompts at temperature {TEMPERATURE}, every position"
        )
        return {"kept": self.kept, "ways": ways, "measured_on": f"{on}; calibrated on {len(CALIBRATION)} other prompts"}


def make_head(work: Path, wanted: Plan, recipe: Recipe, progress: Progress) -> HeadOutcome | None:
    """Choose how the head is stored, and write it so.

    Args:
        work: a package whose head is dense.

    Returns:
        None if the recipe wants it dense, which needs no measuring, or there are no layers to quantise.
    """
    if recipe.head == DENSE:
        return None
    llm = LLM.open(work.name, work, load_settings(session_cache_max_bytes=0, draft_vocabulary=recipe.draft_vocabulary))
    model: Any = llm.loaded.model
    layers = _quantisable(model.mtp, recipe.group_size)
    if not layers:
        return None
    depth = min(llm.max_depth, DEPTH)
    told = _telling(progress, "calibration", TOKENS * len(CALIBRATION))
    with recorded(model.mtp, layers.__contains__) as seen:
        answers(llm, CALIBRATION, tokens=TOKENS, depth=depth, tell=told)
    stored = mx.load(str(work / HEAD_FILE))
    assert isinstance(stored, dict)
    ways = {
        DENSE: stored,
        NAIVE: _quantised(stored, layers, recipe, {}),
        CALIBRATED: _quantised(stored, layers, recipe, seen),
    }
    heads = {way: _head(llm, tensors, recipe.group_size) for way, tensors in ways.items()}
    told = _telling(progress, "held-out texts", TOKENS * len(HELD_OUT))
    texts = answers(llm, HELD_OUT, tokens=TOKENS, depth=depth, tell=told)
    acceptance = measure(model, heads, texts, depth=depth, tell=_telling(progress, "acceptance", len(texts)))
    kept = _best(acceptance) if recipe.head == "auto" else recipe.head
    if kept != DENSE:
        _write(work, ways[kept])
    nbytes = {way: sum(tensor.nbytes for tensor in tensors.values()) for way, tensors in ways.items()}
    return HeadOutcome(kept, acceptance, nbytes, len(texts))


def _telling(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    return lambda done: progress(what, done, total)


def _best(acceptance: Mapping[str, Acceptance]) -> str:
    """The calibrated codes, unless other tensors draft clearly better: then those that draft best."""
    calibrated = acceptance[CALIBRATED]
    clearly = {}
    for way, found in acceptance.items():
        more, error = found.over(calibrated)
        if more > max(error, WITHIN * calibrated.tokens_per_cycle):
            clearly[way] = more
    return max(clearly, key=clearly.__getitem__, default=CALIBRATED)


def _quantisable(head: nn.Module, group_size: int) -> list[str]:
    return [
        path
        for path, layer in head.named_modules()
        if hasattr(layer, "to_quantized") and not path.endswith(_STAYS) and layer.weight.shape[-1] % group_size == 0
    ]


def _quantised(stored: Stored, layers: list[str], recipe: Recipe, seen: Mapping[str, Inputs]) -> Stored:
    """A head's tensors with some layers in codes: calibrated where it is known what they were fed, else rounded."""
    dtype = getattr(mx, recipe.dtype)
    found = dict(stored)
    for path in layers:
        weight = stored[f"{HEAD}{path}.weight"]
        form: Any = {"bits": BITS, "group_size": recipe.group_size}
        if path in seen:
            made = calibrated(weight, seen[path], dtype=dtype, **form)
        else:
            made = mx.quantize(weight.astype(dtype), **form)
        found |= zip((f"{HEAD}{path}.{part}" for part in ("weight", "scales", "biases")), made, strict=True)
    mx.eval(found)
    return found


def _head(llm: LLM, tensors: Stored, group_size: int) -> nn.Module:
    """A head that computes with such tensors, as it would be loaded."""
    whole: Any = llm.checkpoint.architecture.build(llm.checkpoint.text_config, True)
    head: nn.Module = whole.mtp
    coded = {name.removeprefix(HEAD).removesuffix(".scales") for name in tensors if name.endswith(".scales")}
    nn.quantize(head, group_size=group_size, bits=BITS, class_predicate=lambda path, _: path in coded)
    dtype = llm.loaded.dtype
    head.load_weights(
        [
            (name.removeprefix(HEAD), tensor.astype(dtype) if mx.issubdtype(tensor.dtype, mx.floating) else tensor)
            for name, tensor in tensors.items()
        ]
    )
    head.eval()
    mx.eval(head.parameters())
    return head


def _write(work: Path, tensors: Stored) -> None:
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
