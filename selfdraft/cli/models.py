"""`selfdraft models`: what is on this machine and what runs here; with --catalogue, what could be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from ..catalogue import CATALOGUE, MEMORIES, CatalogueEntry
from .command import command
from .flags import flag
from .found_models import FoundModel, find_models, gigabytes, memory_for
from .rows import show_table
from .terminal import say

if TYPE_CHECKING:
    from ..settings import Settings

__all__ = ["models"]

_LEFT_FOR_MODELS = 0.75  # of a machine's memory: what systems leave to a GPU, or to one program
_COMMIT = 12  # digits of a commit that are shown


@command
def models(
    *,
    catalogue: Annotated[
        bool, flag("--catalogue", "List models to pull, and which of them fit here. Default: off.")
    ] = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object, with a schema_version. Default: off.")] = False,
) -> None:
    """List the models on this machine, and whether they run.

    Found are: the bundled one; those in the Hugging Face cache, pulled or
    fetched otherwise; and folders in ., ~/models, ~/.lmstudio/models, in the
    folders of $SELFDRAFT_MODEL_FOLDERS, and on disks that are plugged in.
    """
    from ..device import choose_blas
    from ..settings import load_settings

    settings = load_settings()
    choose_blas(settings.blas)  # before MLX comes in
    from ..memory import free_memory

    free = free_memory()
    found = find_models(settings)
    offered = [_offered(entry, settings, free, found) for entry in CATALOGUE] if catalogue else []
    if as_json:
        report = {"schema_version": 1, "free_memory_bytes": free, "models": [_entry(each, free) for each in found]}
        print(json.dumps(report | ({"catalogue": offered} if catalogue else {})))
        return
    if catalogue:
        head = ("model", "parameters", "weights", "download", "memory", "here")
        show_table(head, [_offered_row(each) for each in offered])
        say("`selfdraft pull ID` fetches one")
        return
    show_table(("model", "kind", "size", "MTP head", "memory", "commit"), [_row(each, free) for each in found])
    for each in found:
        if each.problem:
            say(f"{each.name} cannot run: {each.problem}")


def _entry(found: FoundModel, free: int) -> dict[str, Any]:
    return {
        "model": found.name,
        "kind": found.kind,
        "folder": str(found.folder),
        "commit": found.commit or None,
        "pinned": found.kind == "pulled",
        "disk_bytes": found.disk,
        "head": {"usable": not (found.head or found.problem), "reason": found.head},
        "memory_bytes": found.memory,
        "fits_memory": not found.problem and found.memory <= free,
        "problem": found.problem,
    }


def _row(found: FoundModel, free: int) -> tuple[str, ...]:
    if found.problem:
        return found.name, found.kind, gigabytes(found.disk), "", "cannot run", found.commit[:_COMMIT]
    fits = "fits" if found.memory <= free else "TOO BIG"
    pinned = f" {'pinned' if found.kind == 'pulled' else ''}".rstrip()
    head = "no" if found.head else "yes"
    memory = f"{fits}: {gigabytes(found.memory)}"
    return found.name, found.kind, gigabytes(found.disk), head, memory, found.commit[:_COMMIT] + pinned


def _offered(entry: CatalogueEntry, settings: Settings, free: int, found: list[FoundModel]) -> dict[str, Any]:
    """What there is to say of a model that could be pulled."""
    from ..device import choose_dtype
    from ..models import architecture

    dtype = choose_dtype(settings.dtype, quantised=entry.quantised)
    wider = dtype.size * 8 / entry.bits if dtype and not entry.quantised else 1.0
    needed = memory_for(entry.bytes)
    return {
        "model": entry.id,
        "parameters": int(entry.parameters * 1e9),
        "bits": entry.bits,
        "disk_bytes": int(entry.bytes),
        "machine_gb": next(size for size in MEMORIES if needed <= size * 1e9 * _LEFT_FOR_MODELS),
        "memory_bytes": memory_for(entry.bytes * wider),
        "fits_memory": memory_for(entry.bytes * wider) <= free,
        "supported": architecture(entry.model_type) is not None,
        "here_already": any(each.name.partition("@")[0] == entry.id for each in found),
    }


def _offered_row(offered: dict[str, Any]) -> tuple[str, ...]:
    fits = "fits" if offered["fits_memory"] else f"too big: needs {gigabytes(offered['memory_bytes'])}"
    here = fits if offered["supported"] else "its family is not supported yet"
    return (
        offered["model"],
        f"{offered['parameters'] / 1e9:.1f} billion",
        "bfloat16" if offered["bits"] == 16 else f"{offered['bits']}-bit",
        f"about {gigabytes(offered['disk_bytes'])}",
        f"{offered['machine_gb']} GB",
        here + (", is here already" if offered["here_already"] else ""),
    )
