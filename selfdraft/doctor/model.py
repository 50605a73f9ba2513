"""A model that was asked for by name: what it is, whether it drafts, whether it fits. Downloads nothing."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import CheckpointError, ModelNotFound, OutOfMemoryBudget
from .context import Context
from .finding import Finding
from .registry import check

__all__: list[str] = []


@check("model", needs_mlx=True)
def _model(context: Context) -> Iterator[Finding]:
    if context.model is None:
        yield Finding("model", "skip", "none was named; --model NAME looks at one")
        return
    from ..models.checkpoint import classify
    from ..source import find_model

    expected = "a checkpoint that can be loaded"
    try:
        checkpoint = classify(find_model(context.model, fetch=False))
    except ModelNotFound as error:
        yield Finding("model", "fail", str(error), expected, "name a folder, or fetch it: `selfdraft pull NAME`")
        return
    except CheckpointError as error:
        yield Finding(
            "model", "fail", str(error), expected, "see `selfdraft inspect`; fetch it again, or take another build"
        )
        return
    yield Finding("model", "ok", f"{context.model}: {checkpoint.model_type}, {checkpoint.layout} layout")
    if reason := checkpoint.head.reason:
        fix = "take a build that keeps its head; without one it is decoded plainly"
        yield Finding("model head", "warn", reason, "an MTP head", fix)
    else:
        yield Finding("model head", "ok", f"{checkpoint.head.source}, {checkpoint.head.tensors} tensors")

    from ..device import choose_dtype
    from ..memory import Allowance, gibibytes

    settings = context.settings
    weights = checkpoint.weight_bytes(
        choose_dtype(settings.dtype, quantised=checkpoint.quantised, dense_experts=checkpoint.dense_experts),
        tower=settings.vision != "off",
    )
    try:
        granted = Allowance.of(weights, settings.memory_limit)
    except OutOfMemoryBudget as error:
        said, _, remedy = str(error).partition(": ")
        yield Finding("model memory", "fail", said, "weights, and room for answers", remedy)
        return
    left = f"{gibibytes(granted.total - weights)} of {gibibytes(granted.total)} for answers"
    yield Finding(
        "model memory", "ok", f"weights {gibibytes(weights)}, which leave {left}", figures={"weights": weights}
    )
