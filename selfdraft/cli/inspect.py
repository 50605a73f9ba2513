"""`selfdraft inspect`: what a model folder holds and what will run. Goes by the one classifier; guesses nothing."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..stamp import read_stamp
from .command import command
from .flags import AdapterPath, flag
from .rows import show_rows
from .session import loading_bar

if TYPE_CHECKING:
    import mlx.core as mx

    from ..models.adapters import Adapter
    from ..models.checkpoint import Checkpoint
    from ..settings import Settings
    from ..stamp import Stamp

__all__ = ["REPORT_VERSION", "depth_limit", "inspect", "runs"]

REPORT_VERSION = 1


@command
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="'reference' (bundled), a local folder, or a Hugging Face id. Default: reference.",
            show_default=False,
        ),
    ] = "reference",
    *,
    adapter_path: AdapterPath = None,
    as_json: Annotated[
        bool, flag("--json", "Print the report as one JSON object, with a schema_version. Default: off.")
    ] = False,
) -> None:
    """Say what a model is, and what will run.

    Names, shapes and dtypes come from the headers of its files. Only a head
    in a separate file makes it load the model, to probe whether the two
    belong together, as every load does.
    """
    from ..device import choose_blas
    from ..settings import load_settings

    settings = load_settings(adapter_path=adapter_path)
    choose_blas(settings.blas)  # before MLX comes in
    from ..models.checkpoint import classify
    from ..source import find_model

    report = _report(model, classify(find_model(model)), settings)
    if as_json:
        print(json.dumps(report))
    else:
        show_rows(_rows(report))


def _report(name: str, checkpoint: Checkpoint, settings: Settings) -> dict[str, Any]:
    """Everything there is to say, as `--json` prints it."""
    from ..models.adapters import read_adapter
    from ..opening import sampling_defaults
    from ..text import ChatTemplate
    from ..vision import tower_report

    head, config = checkpoint.head, checkpoint.text_config
    kinds = (config.get("layer_types") or ())[: config["num_hidden_layers"]]  # some list the head's behind the trunk's
    template = ChatTemplate.from_folder(checkpoint.folder)
    built = _built(checkpoint)
    stamp = read_stamp(checkpoint.folder)
    depth, reason, probed = _what_runs(name, checkpoint, settings, built["max_depth"])
    depth = stamp.limited(depth) if stamp else depth
    adapter = read_adapter(settings.adapter_path, checkpoint) if settings.adapter_path else None
    placed = _placed(checkpoint, adapter) if adapter else {}
    return {
        "schema_version": REPORT_VERSION,
        "model": name,
        "folder": str(checkpoint.folder),
        "model_type": checkpoint.model_type,
        "verified": checkpoint.architecture.verified,
        "layers": config["num_hidden_layers"],
        "layer_types": dict(Counter(kinds)),
        "hidden_size": config["hidden_size"],
        "vocabulary": built["vocabulary"],
        "context_length": built["context_length"],
        "layout": checkpoint.layout,
        "norms": {"trunk": checkpoint.norms, "head": head.norms},
        "weights_bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "stored_dtype": _name(checkpoint.stored_dtype),
        "quantisation": built["quantisation"],
        "head": {
            "source": head.source,
            "tensors": head.tensors,
            "usable": not reason,
            "probed": probed,
            "reason": reason,
        },
        "vision": asdict(tower_report(checkpoint, settings.vision)),
        "adapter": {**adapter.describe(), **placed} if adapter else None,
        "max_depth": depth,
        "sampling_defaults": sampling_defaults(checkpoint),
        "chat_template": template is not None,
        "thinking": template is not None and "enable_thinking" in template.variables,
        "stamp": _stamped(stamp) if stamp else None,
        "notes": [*checkpoint.notes, *(stamp.notes if stamp else ()), *(adapter.notes(name) if adapter else ())],
        "device": _device(checkpoint, settings),
        "runs": runs(depth, reason),
    }


def _placed(checkpoint: Checkpoint, adapter: Adapter) -> dict[str, int]:
    """How many layers of the model it goes into, by way; or why it does not fit. Nothing is evaluated."""
    from ..models.adapter_placement import Placed
    from ..models.fit import quantise_as_stored
    from ..models.low_rank import put_beside

    placed = Placed(checkpoint, adapter, None)
    module: Any = checkpoint.architecture.build(checkpoint.text_config, False)
    quantise_as_stored(module, placed.tensors)
    put_beside(module, placed.beside, checkpoint.stored_dtype)
    return {"fused": placed.fused, "beside": len(placed.beside)}


def _stamped(stamp: Stamp) -> dict[str, Any]:
    """What selfdraft.json says, without digests and figures."""
    return {
        "source": stamp.source,
        "recipe": stamp.recipe,
        "head": stamp.head.get("kept"),
        "verdict": stamp.verdict,
        "reasons": list(stamp.reasons),
        "verified": stamp.evidence.get("when"),
        "depth_limit": stamp.depth_limit,
    }


def depth_limit(checkpoint: Checkpoint) -> int:
    """The deepest draft that a checkpoint allows, by its own head and stamp; 0 without a head that can be used."""
    depth = 0 if checkpoint.head.reason else int(_built(checkpoint)["max_depth"])
    stamp = read_stamp(checkpoint.folder)
    return stamp.limited(depth) if stamp else depth


def runs(depth: int, reason: str) -> str:
    """What will run, for people.

    Args:
        depth: deepest draft.
        reason: why its head is not used; empty if it is.
    """
    if reason or depth:
        return f"plain decoding: {reason}" if reason else f"self-speculative decoding, depth auto (up to {depth})"
    return "plain decoding: no draft paid where `forge verify` measured it"


def _built(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the module that would be loaded says of itself. It is built, lazily, and never evaluated."""
    from ..models.fit import quantise_as_stored
    from ..models.loader import quantisation_of

    module: Any = checkpoint.architecture.build(checkpoint.text_config, not checkpoint.head.reason)
    quantise_as_stored(module, checkpoint.tensors)
    return {
        "vocabulary": module.vocab_size,
        "context_length": module.context_length,
        "max_depth": module.max_depth,
        "quantisation": quantisation_of(module),
    }


def _device(checkpoint: Checkpoint, settings: Settings) -> dict[str, str]:
    """Where it will run, and in which dtype."""
    import mlx.core as mx

    from ..device import active_blas, choose_dtype

    dtype = (
        choose_dtype(settings.dtype, quantised=checkpoint.quantised, dense_experts=checkpoint.dense_experts)
        or checkpoint.stored_dtype
    )
    device = "cpu" if mx.default_device() == mx.cpu else "gpu"
    return {"device": device, "blas": active_blas(), "dtype": _name(dtype)}


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _what_runs(name: str, checkpoint: Checkpoint, settings: Settings, depth: int) -> tuple[int, str, bool]:
    """Depth limit, why there is no drafting (or nothing), whether the head was probed."""
    if checkpoint.head.source != "separate" or checkpoint.head.reason:
        return depth, checkpoint.head.reason, False
    from ..llm import LLM

    with loading_bar(name) as bar:
        llm = LLM.open(name, checkpoint.folder, settings, progress=bar)
    why = "plain decoding: "
    reasons = [note.removeprefix(why) for note in llm.notes if note.startswith(why)]
    return llm.max_depth, " ".join(reasons), True


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report for people, as labels and texts."""
    head, norms, device = report["head"], report["norms"], report["device"]
    kinds = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in report["layer_types"].items())
    defaults = ", ".join(f"{name} {value}" for name, value in report["sampling_defaults"].items())
    formats = ", ".join(f"{kind}: {count} layers" for kind, count in sorted(report["quantisation"].items()))
    verdict = f"not usable: {head['reason']}" if head["reason"] else "usable" + ", probed" * head["probed"]
    verdict = (
        f"{head['source']}, {head['tensors']} tensors; {verdict}" if head["tensors"] else f"none: {head['reason']}"
    )
    thinking = ", knows thinking" if report["thinking"] else ""
    return [
        ("model", report["model"]),
        ("folder", report["folder"]),
        ("type", report["model_type"]),
        ("verified on", report["verified"] or "nothing independent to compare its family with"),
        ("layers", f"{report['layers']} ({kinds})" if kinds else str(report["layers"])),
        ("hidden size", f"{report['hidden_size']:,}"),
        ("vocabulary", f"{report['vocabulary']:,} tokens"),
        ("context", f"{report['context_length']:,} tokens"),
        ("weights", f"{report['weights_bytes'] / 1e6:,.1f} MB, {report['stored_dtype']}, {report['layout']} layout"),
        ("quantisation", formats),
        ("norms", f"trunk {norms['trunk']}" + (f", head {norms['head']}" if norms["head"] else "")),
        ("MTP head", verdict),
        ("vision tower", _tower(report["vision"])),
        *_adapter_rows(report["adapter"]),
        ("depth limit", str(report["max_depth"])),
        ("sampling", defaults or "no defaults of its own"),
        ("chat template", f"yes{thinking}" if report["chat_template"] else "none: prompts need --raw"),
        *_stamp_rows(report["stamp"]),
        *(("note", note) for note in report["notes"]),
        ("will run", report["runs"]),
        ("will run on", f"{device['device']} in {device['dtype']}, BLAS: {device['blas']}"),
    ]


def _tower(vision: dict[str, Any]) -> str:
    if not vision["tensors"]:
        return f"none: {vision['reason']}"
    read = f"not loaded: {vision['reason']}" if vision["reason"] else "reads images"
    return f"{vision['tensors']} tensors, {vision['nbytes'] / 1e6:,.1f} MB; {read}"


def _adapter_rows(adapter: dict[str, Any] | None) -> list[tuple[str, str]]:
    if adapter is None:
        return []
    ranks = ", ".join(map(str, adapter["ranks"]))
    what = f"{adapter['name']}: {adapter['method']} of rank {ranks} in {adapter['format']}'s format"
    return [("adapter", f"{what}; changed: {adapter['fused']} dense, {adapter['beside']} quantised")]


def _stamp_rows(stamp: dict[str, Any] | None) -> list[tuple[str, str]]:
    if stamp is None:
        return []
    recipe = stamp["recipe"]
    made = f"{recipe.get('bits')} bits, group {recipe.get('group_size')}" if recipe else "not by `forge build`"
    head = f", head {stamp['head']}" if stamp["head"] else ""
    verdict = f"{stamp['verdict']}, {stamp['verified']}" if stamp["verdict"] else "not verified"
    return [("made", f"{made} of {stamp['source']}{head}"), ("verified", verdict)]
