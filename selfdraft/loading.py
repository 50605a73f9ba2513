"""`load`: from a model's name to an `LLM`. Chooses the BLAS before MLX comes in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .device import choose_blas
from .errors import FanError
from .settings import Settings, load_settings
from .source import find_model

if TYPE_CHECKING:
    from .distributed.leading import Leader
    from .llm import LLM
    from .memory import Holdings

__all__ = ["load"]


def load(
    model: str = "reference",
    *,
    settings: Settings | None = None,
    adapter: str | Path | None = None,
    profile: bool = False,
    progress: Callable[[int, int], None] | None = None,
    leader: Leader | None = None,
    beside: Callable[[], Holdings] | None = None,
) -> LLM:
    """Load a model and its tokenizer.

    Args:
        model: "reference" (bundled), a local folder, or a Hugging Face id ("owner/name", "owner/name@revision").
        settings: how the engine runs; by default from the environment (SELFDRAFT_*).
        adapter: folder of a LoRA or DoRA adapter for the trunk; by default that of the settings.
        profile: time the stages of every cycle (slower; `llm.profile_report()` has the result).
        progress: called with (bytes read, bytes in all) while weights are read.
        leader: on rank 0 of a group, see docs/scaling.md.
        beside: what other models of this process hold, whenever it is called, from any thread; by default there are
            none.

    Raises:
        ModelNotFound: nothing by that name.
        CheckpointError: the folder or the adapter cannot be used, with what is wrong in it.
    """
    settings = settings or load_settings()
    if adapter is not None:
        settings = settings.model_copy(update={"adapter_path": Path(adapter)})
    choose_blas(settings.blas)  # before MLX comes in, which a model on the Hub needs to be judged
    folder = find_model(model)
    from .llm import LLM  # MLX is imported here
    from .memory import Holdings

    llm = LLM.open(
        model, folder, settings, profile=profile, progress=progress, leader=leader, beside=beside or Holdings
    )
    if settings.mode == "max":
        _hold_fans(llm)
    return llm


def _hold_fans(llm: LLM) -> None:
    """Max mode, or a note why it is not to be had."""
    from .fans.max_mode import MaxMode

    try:
        llm.hold_fans(MaxMode.open(f"a process with {llm.name}"))
    except FanError as error:
        llm.notes.append(f"the mode max is sustained here: {error}")
