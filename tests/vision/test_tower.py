"""Guards what is taken for a vision tower: released layouts, MLX's and quantised ones; anything else is said, by name.

The grids and pixels of pictures are those of mlx-vlm's processor as well, over many shapes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from PIL import Image

from selfdraft.errors import CheckpointError, InvalidRequest
from selfdraft.forge.build import build
from selfdraft.forge.recipe import Recipe
from selfdraft.models.checkpoint import Checkpoint, classify
from selfdraft.vision import inspect_tower, load_tower
from selfdraft.vision.patches import Patching
from selfdraft.vision.tower import NEEDS
from tests.reference.vision_checkpoints import CHECKPOINTS, PREPROCESSOR
from tests.support.families import stored
from tests.support.vision import pictured, write_reference

DENSE = CHECKPOINTS[0]
PREFIX = "model.visual."
PICTURE = pictured(26, 17)
Tensors = dict[str, mx.array]


def changed(folder: Path, change: Callable[[Tensors, dict[str, Any]], Any]) -> Checkpoint:
    """A checkpoint with other tensors or another configuration."""
    write_reference(DENSE, folder)
    tensors, config = stored(folder), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return classify(folder)


def embeddings(checkpoint: Checkpoint) -> mx.array:
    tower = load_tower(checkpoint, mx.float32)
    return tower.encode(PICTURE, tower.grid(PICTURE))


def as_mlx(tensors: Tensors, config: dict[str, Any]) -> None:
    """As mlx-vlm's conversion stores it."""
    for name in [name for name in tensors if name.startswith(PREFIX)]:
        tensor = tensors.pop(name)
        if name.endswith("patch_embed.proj.weight"):
            tensor = tensor.transpose(0, 2, 3, 4, 1)
        tensors[name.replace(PREFIX, "vision_tower.")] = tensor


def test_mlx_layout(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    released, converted = changed(tmp_path / "a", lambda *_: None), changed(tmp_path / "b", as_mlx)
    assert inspect_tower(converted) == inspect_tower(released)
    assert mx.array_equal(embeddings(converted), embeddings(released))


def test_a_quantised_tower(tmp_path: Path) -> None:
    def quantise(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith(f"{PREFIX}blocks") and tensors[name].ndim == 2]:
            if tensors[name].shape[1] % 32 == 0:
                parts = mx.quantize(tensors[name], group_size=32, bits=8)
                path = name.removesuffix("weight")
                tensors |= dict(zip((name, f"{path}scales", f"{path}biases"), parts, strict=True))

    (tmp_path / "a").mkdir()
    checkpoint = changed(tmp_path / "a", quantise)
    tower = load_tower(checkpoint, None)
    kinds = [type(layer) for _, layer in tower._module.named_modules()]
    assert kinds.count(nn.QuantizedLinear) == 6
    dense = changed(tmp_path, lambda *_: None)
    assert tower.nbytes == inspect_tower(checkpoint).nbytes < inspect_tower(dense).nbytes
    exact = embeddings(dense)
    assert mx.abs(tower.encode(PICTURE, tower.grid(PICTURE)) - exact).max().item() < 0.1  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, c: t.pop(f"{PREFIX}blocks.1.attn.qkv.bias"), "missing blocks.1.attn.qkv.bias"),
        (lambda t, c: t.update({f"{PREFIX}blocks.7.norm1.bias": mx.zeros(3)}), "surplus blocks.7.norm1.bias"),
        (lambda t, c: t.update({f"{PREFIX}pos_embed.weight": mx.zeros((9, 32))}), "pos_embed.weight has shape"),
        (lambda t, c: c.pop("vision_config"), "no vision_config"),
        (lambda t, c: c["vision_config"].update(depth="two"), "depth is 'two'"),
        (lambda t, c: c["vision_config"].update(num_heads=5), "5 heads do not divide"),
        (lambda t, c: c["vision_config"].update(deepstack_visual_indexes=[0]), "deepstack_visual_indexes"),
        (lambda t, c: c["vision_config"].update(out_hidden_size=8), "out_hidden_size is not"),
        (lambda t, c: c["vision_config"].update(patch_size=8), "patches of different sizes"),
        (lambda t, c: c["text_config"]["rope_parameters"].pop("mrope_section"), "rope_parameters"),
        (lambda t, c: c["text_config"]["rope_parameters"].update(mrope_section=[9, 1, 1]), "rope_parameters"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, change: Callable[..., Any], said: str) -> None:
    checkpoint = changed(tmp_path, change)
    report = inspect_tower(checkpoint)
    assert said in report.reason
    assert report.tensors > 0
    with pytest.raises(CheckpointError, match=said):
        load_tower(checkpoint, None)


class Missing:
    """Finds no mlx-vlm."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "mlx_vlm":
            raise ModuleNotFoundError("No module named 'mlx_vlm'", name=name)


def test_without_mlx_vlm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    report = inspect_tower(classify(write_reference(DENSE, tmp_path)))
    assert report.reason == f"reading pictures needs mlx-vlm, which is not installed: {NEEDS}"
    assert report.nbytes > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patch_size": None}, "patch is None"),
        ({"size": {"shortest_edge": 512}}, "no 'longest_edge'"),
        ({"size": {"shortest_edge": 512, "longest_edge": 511}}, "512, is over the most, 511"),
        ({"do_resize": False}, "do_resize is off"),
        ({"resample": 2}, "resample is 2"),
        ({"image_std": [0.5, 0.5, 0]}, "none of them 0"),
        ({"image_mean": "half"}, "could not convert"),
    ],
)
def test_settings_that_cannot_be_used(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **settings}))
    with pytest.raises(CheckpointError, match=said):
        Patching.from_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="does not say"):
        Patching.from_folder(tmp_path)


def test_pixel_caps_by_their_other_names(tmp_path: Path) -> None:
    settings = {**PREPROCESSOR, "min_pixels": 64, "max_pixels": 640}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    patching = Patching.from_folder(tmp_path)
    assert (patching.least, patching.most) == (64, 640)


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (7, 90), (26, 17), (64, 64), (200, 1), (333, 100), (640, 480)])
def test_pixels_are_those_of_mlx_vlm(tmp_path: Path, size: tuple[int, int]) -> None:
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

    patching = Patching.from_folder(write_reference(DENSE, tmp_path))
    names = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
    kept = {name: PREPROCESSOR[name] for name in names}
    theirs = Qwen3VLImageProcessor(min_pixels=512, max_pixels=1100, **kept)([Image.fromarray(pictured(*size).rgb)])
    grid = patching.grid(*size)
    assert [[1, grid.height, grid.width]] == np.array(theirs["image_grid_thw"]).tolist()
    assert np.abs(patching.patches(pictured(*size).rgb, grid) - np.array(theirs["pixel_values"])).max() < 1e-6


def test_strips_are_refused(tmp_path: Path) -> None:
    patching = Patching.from_folder(write_reference(DENSE, tmp_path))
    with pytest.raises(InvalidRequest, match="201x1 pixels: one side may be at most 200 times the other"):
        patching.grid(201, 1)


def test_working_memory_is_more_than_it_takes(tmp_path: Path) -> None:
    tower = load_tower(classify(write_reference(DENSE, tmp_path)), mx.float32)
    tower._patching = Patching(4, 2, 2, 64, 10**6, 1 / 255, (0.5,) * 3, (0.5,) * 3)
    large = pictured(240, 200)
    grid = tower.grid(large)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    tower.encode(large, grid)
    assert mx.get_peak_memory() - before < tower.working_bytes(grid) + tower.embeddings_bytes(grid)


def test_what_forge_writes_loads_here(tmp_path: Path) -> None:
    """A trunk of 4 bits, and the tower bit for bit."""
    (tmp_path / "source").mkdir()
    source = write_reference(DENSE, tmp_path / "source")
    build(source, tmp_path / "package", Recipe(bits=4, group_size=32, head="dense"))
    package = classify(tmp_path / "package")
    assert package.quantised
    assert mx.array_equal(embeddings(package), embeddings(classify(source)))
