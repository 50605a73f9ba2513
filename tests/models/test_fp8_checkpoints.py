"""Guards that families whose checkpoints are released in FP8 decode as what these stand for, trunk and head."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.models.base import architecture
from selfdraft.models.checkpoint import classify
from selfdraft.models.fp8 import SCALES, dequantised
from selfdraft.models.loader import build_model
from tests.reference.families import FAMILIES, Family
from tests.support.rows import request, solo

RELEASED = ["mimo_v2_flash", "step3p5"]
SETTINGS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def numbers(weight: mx.array) -> np.ndarray:
    return np.array(mx.from_fp8(weight, dtype=mx.float32))


@pytest.mark.parametrize(("rows", "anew"), [(768, True), (768, False), (384, True)])
def test_keys_of_mimo_v2_flash_may_have_blocks_a_head(rows: int, anew: bool) -> None:
    """Layers that see everything were stored a head of 192 rows apart: 128 and 64, then 128 and 64 again."""
    name, heads = "model.layers.0.self_attn.k_proj.weight", rows // 192
    weight = mx.to_fp8(mx.array(random(rows, 256)))
    scales = np.exp(random(heads * 2 if anew else rows // 128, 2, seed=1))
    family: Any = architecture("mimo_v2_flash")
    tensors = {name: weight, f"{name}{SCALES}": mx.array(scales)}
    found = dequantised(tensors, lambda name: family.fp8_rows(name, {"head_dim": 192}))
    assert found.keys() == {name}
    blocks = [2 * (row // 192) + row % 192 // 128 if anew else row // 128 for row in range(rows)]
    wanted = numbers(weight) * scales[blocks].repeat(128, axis=1)
    np.testing.assert_allclose(np.array(found[name].astype(mx.float32)), wanted, rtol=2**-8)


def write(path: Path, tensors: dict[str, mx.array]) -> None:
    """Safetensors in which uint8 is FP8, which MLX does not write."""
    kinds = {mx.uint8: "F8_E4M3", mx.float32: "F32", mx.bfloat16: "BF16"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, tensor in tensors.items():
        data = bytes(np.array(tensor.view(mx.uint8)))
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": kinds[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_both(family: Family, released: Path, plain: Path) -> None:
    """The checkpoint with projections in FP8, as Hugging Face stores it, and what these stand for."""
    stored: dict[str, mx.array] = {}
    meant: dict[str, mx.array] = {}
    for name, values in family.weights().items():
        if name.endswith("_proj.weight") and "eh_proj" not in name:
            *stack, _, _ = values.shape
            scales = np.exp(random(*stack, 1, 1, seed=len(name)))
            stored[name], stored[f"{name}{SCALES}"] = mx.to_fp8(mx.array(values)), mx.array(scales)
            meant[name] = mx.array(numbers(stored[name]) * scales).astype(mx.bfloat16)
        else:
            stored[name] = meant[name] = mx.array(values).astype(mx.bfloat16)
    for folder, tensors, config in (
        (released, stored, family.config | {"quantization_config": SETTINGS}),
        (plain, meant, family.config),
    ):
        folder.mkdir()
        write(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", RELEASED)
def test_a_checkpoint_decodes_as_what_it_stands_for(name: str, tmp_path: Path) -> None:
    family, folders = FAMILIES[name], (tmp_path / "released", tmp_path / "plain")
    write_both(family, *folders)
    drafted = []
    for folder in folders:
        checkpoint = classify(folder)
        assert (checkpoint.head.reason, bool(checkpoint.notes)) == ("", folder.name == "released")
        model = build_model(checkpoint, with_head=True, dtype=mx.float32).model
        asked = [request(family.prompt(20).tolist(), temperature=0.0, max_tokens=20, depth=depth) for depth in (0, 2)]
        rows = [solo(model, each) for each in asked]
        assert rows[0].emitted == rows[1].emitted
        drafted.append((rows[1].emitted, rows[1].statistics))
    assert drafted[0][0] == drafted[1][0]
    assert drafted[0][1].emitted == drafted[1][1].emitted  # accepted drafts, corrections, bonuses
