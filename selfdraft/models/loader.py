"""From a classified checkpoint to a module: strict names, quantisation as stored, norms as 1 + w."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from ..errors import CheckpointError
from .adapter_placement import Placed
from .adapters import Adapter
from .base import Model
from .checkpoint import HEAD, Checkpoint
from .few_rows import use_few_row_kernels
from .fit import describe_misfits
from .low_rank import put_beside
from .sharding import Part, Ranks, install, part_of

__all__ = ["LoadedModel", "always_fp32", "build_model", "quantisation_of", "stored_as"]

Progress = Callable[[int, int], None]

_QUANTISED: Any = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear, QuantizedMultiLinear)

# Decay rates span e^-8 .. e^3: below fp32 a rate is rounded away. What an expert's score is corrected by decides ties.
# mlx-lm keeps both in fp32 too.
_ALWAYS_FP32 = ("A_log", "e_score_correction_bias", "router_bias")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, and what a user should know of it."""

    model: Model
    dtype: mx.Dtype
    quantisation: dict[str, int]
    nbytes: int


def build_model(
    checkpoint: Checkpoint,
    *,
    with_head: bool,
    dtype: mx.Dtype | None = None,
    progress: Progress | None = None,
    adapter: Adapter | None = None,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Load the weights.

    Args:
        with_head: also load the MTP head; its report must not carry a reason against it.
        dtype: of every floating tensor (A_log apart); None keeps what is stored.
        progress: called with (bytes read, bytes in all).
        adapter: what to change the trunk by; not with ranks.
        ranks: load this rank's part alone.

    Raises:
        CheckpointError: tensors are missing, surplus, or of the wrong shape, each by name; the adapter is for another
            model; the ranks cannot share it.
    """
    assert adapter is None or ranks is None, "ranks take no adapter"
    family = checkpoint.architecture
    part = _part(checkpoint, ranks) if ranks else None
    module = family.build(part.config if part else checkpoint.text_config, with_head)
    loaded = _fill(module, checkpoint, with_head, dtype, adapter, part)
    module.eval()
    if part and ranks:
        install(module, part, ranks)
    use_few_row_kernels(module)
    _read(module, progress)
    return loaded


def _part(checkpoint: Checkpoint, ranks: Ranks) -> Part:
    sharding = checkpoint.architecture.sharding
    if sharding is None:
        raise CheckpointError(
            f"{checkpoint.folder}: models of type {checkpoint.model_type} cannot be shared by several ranks yet; "
            "run it on one machine"
        )
    return sharding(checkpoint.text_config, ranks.rank, ranks.size)


def _fill(
    module: Any,
    checkpoint: Checkpoint,
    with_head: bool,
    dtype: mx.Dtype | None,
    adapter: Adapter | None,
    part: Part | None,
) -> LoadedModel:
    """Give a module its weights, not read yet. Nobody else has them: those that are put together are held once."""
    placed = Placed(checkpoint, adapter, dtype) if adapter else None
    weights = {
        name: stored_as(checkpoint, name, part_of(name, tensor, part.cut(name)) if part else tensor, dtype)
        for name, tensor in (placed.tensors if placed else checkpoint.mapped_anew()).items()
        if with_head or not name.startswith(HEAD)
    }
    if problems := describe_misfits(module, weights):
        raise CheckpointError(f"{checkpoint.folder}: the weights do not fit config.json: {problems}")
    module.load_weights(list(weights.items()), strict=True)
    computed = weights["model.norm.weight"].dtype
    beside = put_beside(module, placed.beside, computed) if placed else 0
    return LoadedModel(
        model=module,
        dtype=computed,
        quantisation=quantisation_of(module),
        nbytes=sum(tensor.nbytes for tensor in weights.values()) + beside,
    )


def quantisation_of(module: nn.Module) -> dict[str, int]:
    """How many layers have which format: {"4-bit group 64": 40, "dense": 3}."""
    counts: dict[str, int] = {}
    for _, layer in module.named_modules():
        if isinstance(layer, _QUANTISED):
            key = f"{layer.bits}-bit group {layer.group_size}"
            key += "" if layer.mode == "affine" else f" {layer.mode}"
        elif hasattr(layer, "to_quantized"):
            key = "dense"
        else:
            continue
        counts[key] = counts.get(key, 0) + 1
    return counts


def always_fp32(name: str) -> bool:
    """Whether a parameter is kept in fp32, whatever the others are."""
    return name.endswith(_ALWAYS_FP32)


def stored_as(
    checkpoint: Checkpoint, name: str, tensor: mx.array, dtype: mx.Dtype | None, head_norms: str = "auto"
) -> mx.array:
    """A tensor of a checkpoint in our convention and a dtype.

    Args:
        dtype: of a floating tensor; None for as it is.
        head_norms: how the head's norms are stored; "auto" for what the checkpoint was found to have.
    """
    zero_centred = checkpoint.architecture.zero_centred
    wanted = dtype if dtype is not None and mx.issubdtype(tensor.dtype, mx.floating) else tensor.dtype
    if always_fp32(name):
        wanted = mx.float32
    convention: str | None = checkpoint.norms
    if name.startswith(HEAD):
        convention = checkpoint.head.norms if head_norms == "auto" else head_norms
    if convention == "zero-centred" and zero_centred and zero_centred(name):
        tensor = tensor.astype(mx.float32) + 1.0
    return tensor.astype(wanted)


def _read(module: nn.Module, progress: Progress | None) -> None:
    """Evaluate the weights in pieces, so that progress can be shown."""
    weights: list[mx.array] = [tensor for _, tensor in dict(tree_flatten(module.parameters())).items()]
    total = sum(tensor.nbytes for tensor in weights)
    done = 0
    batch: list[mx.array] = []
    for tensor in weights:
        batch.append(tensor)
        if sum(x.nbytes for x in batch) >= max(total // 50, 1):
            mx.eval(batch)
            done += sum(x.nbytes for x in batch)
            batch = []
            if progress:
                progress(done, total)
    mx.eval(batch)
    if progress:
        progress(total, total)
