"""The vision tower of a checkpoint: what there is of one, and from a picture to its embeddings.

Its layers are mlx-vlm's, of the extra `selfdraft[vision]`, imported when a tower is loaded or looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import CheckpointError
from ..images import Picture
from ..models.checkpoint import Checkpoint
from ..models.fit import describe_misfits
from .patches import Grid, Patching

__all__ = ["NONE", "Tower", "TowerReport", "inspect_tower", "load_tower"]

NONE = "the checkpoint has no vision tower"
NEEDS = "pip install 'selfdraft[vision]'"

_SIZES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_position_embeddings",
    "out_hidden_size",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
)
_CUT = ("patch_size", "spatial_merge_size", "temporal_patch_size")
_ACTIVATION = "gelu_pytorch_tanh"
_FUSED = (64, 80, 128)  # sizes of a head to which mlx-vlm pads, and for which a GPU keeps no scores


@dataclass(frozen=True)
class TowerReport:
    """What a checkpoint has of a vision tower.

    Attributes:
        tensors: how many; 0 without one.
        nbytes: of these, as stored.
        reason: why pictures cannot be read with it, for people; empty when they can.
    """

    tensors: int
    nbytes: int
    reason: str = ""


class Tower:
    """A tower in memory. Called on the engine's thread, but for `grid`.

    Attributes:
        width: of an embedding.
        nbytes: of its weights.
    """

    def __init__(self, module: Any, patching: Patching, sizes: Mapping[str, int]) -> None:
        self._module = module
        self._patching = patching
        self._sizes = sizes
        self._dtype: mx.Dtype = module.patch_embed.proj.weight.dtype
        self.width = sizes["out_hidden_size"]
        self.nbytes = _nbytes(_parameters(module))

    def grid(self, picture: Picture) -> Grid:
        """The patches of a picture.

        Raises:
            InvalidRequest: it is a strip.
        """
        width, height = picture.size
        return self._patching.grid(width, height)

    def embeddings_bytes(self, grid: Grid) -> int:
        """Bytes of a picture's embeddings."""
        return grid.tokens * self.width * self._dtype.size

    def working_bytes(self, grid: Grid) -> int:
        """Bytes that `encode` takes beside them, from above: pixels, activations of a layer, scores where these are
        kept."""
        count, size = grid.patches, self._dtype.size
        hidden, heads = self._sizes["hidden_size"], self._sizes["num_heads"]
        pixels = 3 * self._sizes["temporal_patch_size"] * self._sizes["patch_size"] ** 2
        kept = mx.default_device() == mx.cpu or hidden // heads > max(_FUSED)
        scores = 2 * size * heads * count * count if kept else 0
        return count * (12 * pixels + 12 * size * hidden + 3 * size * self._sizes["intermediate_size"]) + scores

    def encode(self, picture: Picture, grid: Grid) -> mx.array:
        """The embeddings of a picture [tokens, width], evaluated layer by layer: between layers Ctrl-C is heard."""
        module: Any = self._module
        sizes = mx.array([[1, grid.height, grid.width]])
        pixels = mx.array(self._patching.patches(picture.rgb, grid)).astype(self._dtype)
        x = module.patch_embed(pixels) + module.fast_pos_embed_interpolate(sizes)
        angles, borders = module.rot_pos_emb(sizes), mx.array([0, grid.patches])
        for block in module.blocks:
            x = block(x, cu_seqlens=borders, rotary_pos_emb=angles)
            mx.eval(x)
        embeddings: mx.array = module.merger(x)
        mx.eval(embeddings)
        return embeddings


def inspect_tower(checkpoint: Checkpoint) -> TowerReport:
    """What a checkpoint has of a tower, without reading its weights."""
    tensors = checkpoint.tower()
    try:
        _fitted(checkpoint, tensors)
    except CheckpointError as error:
        return TowerReport(len(tensors), _nbytes(tensors), str(error))
    return TowerReport(len(tensors), _nbytes(tensors))


def load_tower(checkpoint: Checkpoint, dtype: mx.Dtype | None) -> Tower:
    """Load a tower.

    Args:
        dtype: of every floating tensor; None keeps what is stored.

    Raises:
        CheckpointError: see `TowerReport.reason`.
    """
    module, weights, patching, sizes = _fitted(checkpoint, checkpoint.tower())
    if dtype is not None:
        weights = {name: x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x for name, x in weights.items()}
    module.load_weights(list(weights.items()), strict=True)
    module.eval()
    mx.eval(_parameters(module))
    return Tower(module, patching, sizes)


def _fitted(
    checkpoint: Checkpoint, tensors: Mapping[str, mx.array]
) -> tuple[nn.Module, dict[str, mx.array], Patching, dict[str, int]]:
    """A module without weights, and the weights, patches and sizes that fit it.

    Raises:
        CheckpointError: they do not, or mlx-vlm is missing.
    """
    if not tensors:
        raise CheckpointError(NONE)
    sizes, patching = _sizes(checkpoint), Patching.from_folder(checkpoint.folder)
    text = checkpoint.architecture.build(checkpoint.text_config, False)
    if not getattr(text, "takes_pictures", False):
        raise CheckpointError("rope_parameters in config.json are none that are supported with pictures")
    if sizes["out_hidden_size"] != checkpoint.text_config["hidden_size"]:
        raise CheckpointError("the tower's out_hidden_size is not the model's hidden_size in config.json")
    if (patching.patch, patching.merge, patching.frames) != tuple(sizes[name] for name in _CUT):
        raise CheckpointError("preprocessor_config.json and config.json name patches of different sizes")
    module = _module(checkpoint.config["vision_config"])
    weights = {name: _in_mlx_layout(name, tensor) for name, tensor in tensors.items()}
    if problems := describe_misfits(module, weights):
        raise CheckpointError(f"the vision tower does not fit config.json: {problems}")
    return module, weights, patching, sizes


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """The tower's sizes by their names in config.json."""
    config = checkpoint.config.get("vision_config")
    if not isinstance(config, dict):
        raise CheckpointError("config.json has no vision_config for the vision tower")
    for name in _SIZES:
        if type(config.get(name)) is not int or config[name] < 1:
            raise CheckpointError(f"vision_config in config.json: {name} is {config.get(name)!r}, not a whole number")
    if config["hidden_size"] % config["num_heads"]:
        raise CheckpointError(f"vision_config in config.json: {config['num_heads']} heads do not divide hidden_size")
    if config.get("hidden_act", _ACTIVATION) != _ACTIVATION or config.get("deepstack_visual_indexes"):
        raise CheckpointError("vision_config in config.json: hidden_act or deepstack_visual_indexes is not supported")
    return {name: config[name] for name in _SIZES}


def _module(config: Mapping[str, Any]) -> nn.Module:
    try:
        from mlx_vlm.models.qwen3_5.config import VisionConfig
        from mlx_vlm.models.qwen3_5.vision import VisionModel
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "mlx_vlm"
        said = "mlx-vlm, which is not installed" if missing else f"mlx-vlm, which cannot be imported ({error})"
        raise CheckpointError(f"reading pictures needs {said}: {NEEDS}") from error
    module: nn.Module = VisionModel(VisionConfig.from_dict(config))
    return module


def _in_mlx_layout(name: str, tensor: mx.array) -> mx.array:
    """The convolution of the patches: Hugging Face [out, 3, frames, p, p] -> MLX [out, frames, p, p, 3]."""
    if name != "patch_embed.proj.weight" or tensor.ndim != 5 or tensor.shape[-1] == 3:
        return tensor
    return tensor.transpose(0, 2, 3, 4, 1)


def _parameters(module: nn.Module) -> dict[str, mx.array]:
    found: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    return found


def _nbytes(tensors: Mapping[str, mx.array]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
