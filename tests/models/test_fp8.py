"""Guards that FP8 weights in blocks are read as the numbers they stand for, and that no other FP8 is taken for them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.models import fp8
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from tests.reference.families import FAMILIES
from tests.support.reference import run_through

SETTINGS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def number(code: int) -> float:
    """What an e4m3 code stands for (OCP 8-bit floating point, section 5.1): 4 bits of exponent, bias 7, and 3 bits."""
    sign, exponent, fraction = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


NUMBERS = np.array([number(code) for code in range(256)], dtype=np.float32)


def codes(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random codes, none of which is NaN."""
    drawn = np.random.RandomState(seed).randint(0, 254, shape).astype(np.uint8)
    return np.where(drawn == 127, 0, drawn).astype(np.uint8)


def scales_of(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    *first, rows, columns = shape
    blocks = (*first, -(-rows // 128), -(-columns // 128))
    return np.random.RandomState(seed).uniform(0.001, 0.02, blocks).astype(np.float32)


def expanded(weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    *_, rows, columns = weight.shape
    spread = scales.repeat(128, axis=-2).repeat(128, axis=-1)[..., :rows, :columns]
    return NUMBERS[weight] * spread


@pytest.mark.parametrize("shape", [(128, 256), (200, 130), (3, 5), (2, 129, 128)])
def test_each_block_has_its_scale(shape: tuple[int, ...]) -> None:
    weight, scales = codes(shape), scales_of(shape)
    tensors = {"a.weight": mx.array(weight), "a.weight_scale_inv": mx.array(scales), "b": mx.array([1.0])}
    found = fp8.dequantised(tensors)
    assert found.keys() == {"a.weight", "b"}
    assert found["a.weight"].dtype == mx.bfloat16
    assert mx.array_equal(found["a.weight"], mx.array(expanded(weight, scales)).astype(mx.bfloat16)).item()
    assert found["b"].dtype == mx.float32


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({"a.weight": mx.zeros((128, 128)), "a.weight_scale_inv": mx.ones((1, 1))}, "a.weight is .*float32"),
        ({"a.weight": mx.zeros((128, 200), mx.uint8), "a.weight_scale_inv": mx.ones((1, 1))}, r"\[1, 2\]"),
        ({"a.weight": mx.zeros((4, 4), mx.uint8), "a.weight_scale_inv": mx.ones((1, 1), mx.uint8)}, "scales .*uint8"),
        ({"a.weight_scale_inv": mx.ones((1, 1))}, "has no a.weight"),
    ],
)
def test_another_format_is_named(tensors: dict[str, mx.array], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fp8.dequantised(tensors)


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file in which bytes are FP8, a format that no writer at hand knows."""
    header: dict[str, Any] = {}
    done = 0
    for name, values in tensors.items():
        kind = "F8_E4M3" if values.dtype == np.uint8 else "F32"
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [done, done + values.nbytes]}
        done += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for values in tensors.values()))


def checkpoints(folder: Path) -> tuple[Path, Path]:
    """DeepSeek-V3 as it is released, all projections but `eh_proj` in FP8, and the same numbers in bf16."""
    family = FAMILIES["deepseek_v3"]
    released: dict[str, np.ndarray] = {}
    plain: dict[str, mx.array] = {}
    for seed, (name, values) in enumerate(family.weights().items()):
        if "_proj" in name and "eh_proj" not in name:
            released[name], released[name + "_scale_inv"] = codes(values.shape, seed), scales_of(values.shape, seed)
            numbers = expanded(released[name], released[name + "_scale_inv"])
            plain[name] = mx.array(numbers).astype(mx.bfloat16)
        else:
            released[name], plain[name] = values, mx.array(values)
    folders = folder / "released", folder / "plain"
    for each in folders:
        each.mkdir()
    save(folders[0] / "model.safetensors", released)
    mx.save_safetensors(str(folders[1] / "model.safetensors"), plain, {"format": "pt"})
    (folders[0] / "config.json").write_text(json.dumps({**family.config, "quantization_config": SETTINGS}))
    (folders[1] / "config.json").write_text(json.dumps(family.config))
    return folders


def test_a_released_checkpoint_is_what_its_numbers_say(tmp_path: Path) -> None:
    hidden, drafts = [], []
    for folder in checkpoints(tmp_path):
        checkpoint = classify(folder)
        assert checkpoint.head.reason == ""
        assert bool(checkpoint.notes) == (folder.name == "released")
        model: Any = build_model(checkpoint, with_head=True).model
        state = model.new_state()
        hidden.append(run_through(model, [3, 1, 4, 1, 5], state, keep_steps=True))
        drafts.append(model.draft(mx.array([[1, 4, 1, 5]]), hidden[-1][None, :4], [state], [0]))
    assert mx.array_equal(*hidden).item()
    assert mx.array_equal(*drafts).item()


def test_other_blocks_are_refused(tmp_path: Path) -> None:
    released, _ = checkpoints(tmp_path)
    config = {**FAMILIES["deepseek_v3"].config, "quantization_config": {**SETTINGS, "weight_block_size": [1, 128]}}
    (released / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weight_block_size \[1, 128\]"):
        classify(released)
