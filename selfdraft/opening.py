"""From a folder to the parts of an `LLM`: weights, tokenizer, template, engine. Knows files and settings alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .device import choose_dtype
from .distributed.facts import facts
from .engine import RULES, Engine, ProfiledCycle
from .errors import CheckpointError, InvalidRequest
from .memory import Allowance, Holdings
from .models.adapters import Adapter, read_adapter
from .models.checkpoint import Checkpoint, classify
from .models.draft_projection import draft_fewer
from .models.loader import LoadedModel, build_model
from .models.probe import PROBE_TEXT, why_foreign
from .params import SamplingParams
from .sessions import Payload
from .settings import Settings
from .stamp import read_stamp
from .text import ChatTemplate, Tokenizer
from .vision import VisionChoice, choose_vision, tower_report

if TYPE_CHECKING:
    from .distributed.leading import Leader

__all__ = ["Parts", "open_parts", "sampling_defaults", "weight_bytes"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Parts:
    """What an `LLM` is made of.

    Attributes:
        granted: memory for it.
        payload: how warm prefixes are taken apart; None for as one process does.
        beside: what other models of this process hold, whenever it is called.
    """

    name: str
    checkpoint: Checkpoint
    loaded: LoadedModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    engine: Engine
    notes: list[str]
    settings: Settings
    granted: Allowance
    vision: VisionChoice
    adapter: Adapter | None
    payload: Payload | None
    beside: Callable[[], Holdings]


def open_parts(
    name: str,
    folder: Path,
    settings: Settings,
    *,
    profile: bool,
    progress: Progress | None,
    leader: Leader | None,
    beside: Callable[[], Holdings],
) -> Parts:
    """Load what is in a folder; see `LLM.open`."""
    checkpoint, stamp, tokenizer = classify(folder), read_stamp(folder), Tokenizer.from_folder(folder)
    dtype = _dtype(checkpoint, settings)
    vision = choose_vision(checkpoint, settings.vision, tokenizer)
    adapter, weights = _weighed(checkpoint, settings, tower=not vision.reason)
    granted = Allowance.of(weights // (leader.group.size if leader else 1), settings.memory_limit, beside().total)
    granted = leader.meet(facts(checkpoint, dtype), granted) if leader else granted
    granted.enforce()
    if leader:
        loaded, reason = leader.load(checkpoint, dtype, progress)
    else:
        loaded, reason = _with_head_if_sound(checkpoint, tokenizer, dtype, progress, adapter)
    notes = [*checkpoint.notes, *vision.notes, *(adapter.notes(name) if adapter else ())]
    if granted.warning:
        notes.append(granted.warning)
    if reason:
        notes.append(f"plain decoding: {reason}")
    always = tokenizer.special_ids.union(tokenizer.added.values())
    size = settings.draft_vocabulary
    if stamp:
        size = size or stamp.draft_vocabulary
        loaded.model.max_depth = stamp.limited(loaded.model.max_depth)
        notes += stamp.notes
    loaded = draft_fewer(loaded, 0 if leader else size, always)
    rule = RULES[settings.acceptance]
    cycle = ProfiledCycle(loaded.model, rule) if profile else None
    engine = Engine(
        loaded.model, rule=rule, prefill_chunk=settings.prefill_chunk, mode=settings.engine_mode, cycle=cycle
    )
    return Parts(
        name,
        checkpoint,
        loaded,
        tokenizer,
        ChatTemplate.from_folder(folder),
        engine,
        notes,
        settings,
        granted,
        vision,
        adapter,
        leader.payload if leader else None,
        beside,
    )


def weight_bytes(folder: Path, settings: Settings) -> int:
    """Bytes of memory that the weights of the model in a folder will take; they are not read.

    Raises:
        CheckpointError: the folder cannot be used.
    """
    checkpoint = classify(folder)
    tower = not tower_report(checkpoint, settings.vision).reason  # without a tokenizer, which takes longer to read
    return _weighed(checkpoint, settings, tower=tower)[1]


def _weighed(checkpoint: Checkpoint, settings: Settings, *, tower: bool) -> tuple[Adapter | None, int]:
    """The adapter, and bytes of all weights."""
    adapter = read_adapter(settings.adapter_path, checkpoint) if settings.adapter_path else None
    weights = checkpoint.weight_bytes(_dtype(checkpoint, settings), tower=tower)
    return adapter, weights + (adapter.nbytes if adapter else 0)


def _dtype(checkpoint: Checkpoint, settings: Settings) -> mx.Dtype | None:
    return choose_dtype(settings.dtype, quantised=checkpoint.quantised, dense_experts=checkpoint.dense_experts)


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sampling parameters that a checkpoint names.

    Raises:
        CheckpointError: one is out of its range.
    """
    try:
        return SamplingParams.defaults_from_generation_config(checkpoint.generation_config)
    except InvalidRequest as error:
        raise CheckpointError(f"{checkpoint.folder / 'generation_config.json'}: {error}; correct the file") from error


def _with_head_if_sound(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    dtype: mx.Dtype | None,
    progress: Progress | None,
    adapter: Adapter | None,
) -> tuple[LoadedModel, str]:
    """The model with its head; or without, and why."""
    build = partial(build_model, checkpoint, dtype=dtype, progress=progress, adapter=adapter)
    if checkpoint.head.reason:
        return build(with_head=False), checkpoint.head.reason
    loaded = build(with_head=True)
    if checkpoint.head.source == "embedded":
        return loaded, ""
    reason = why_foreign(loaded.model, tokenizer.encode(PROBE_TEXT, special=False))
    if not reason:
        return loaded, ""
    del loaded  # one model in memory at a time
    return build(with_head=False), reason
