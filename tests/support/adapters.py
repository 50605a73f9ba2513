"""Adapters in both formats, with random values; what a weight becomes with one, by the papers' formulas in numpy."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

__all__ = ["RANK", "RandomUpdate", "linear_names", "random_updates", "save_mlx_lm", "save_peft"]

RANK = 4
SCALE = 3.0  # of mlx-lm; alpha is RANK times that in PEFT


@dataclass(frozen=True)
class RandomUpdate:
    """Of one weight [out, in]: a [r, in], b [out, r] and, for DoRA, m [out]."""

    a: np.ndarray
    b: np.ndarray
    m: np.ndarray

    def merged(self, weight: np.ndarray, *, dora: bool = False, scale: float = SCALE) -> np.ndarray:
        """W + scale b a; of DoRA m (W + scale b a) / |W + scale b a|, the norm of each row."""
        whole = weight.astype(np.float64) + scale * self.b.astype(np.float64) @ self.a
        if dora:
            whole *= (self.m / np.sqrt((whole**2).sum(axis=1)))[:, None]
        return whole.astype(np.float32)


def random_updates(weights: Mapping[str, np.ndarray], rank: int = RANK) -> dict[str, RandomUpdate]:
    """One for each weight, by the layer's name, of a tenth of its size."""
    found = {}
    for name, weight in weights.items():
        random = np.random.RandomState(zlib.crc32(name.encode()))
        rows, columns = weight.shape
        a = random.standard_normal((rank, columns)).astype(np.float32)
        b = random.standard_normal((rows, rank)).astype(np.float32)
        size = 0.1 * float(np.abs(weight).mean()) / float(np.abs(b @ a).mean()) / SCALE
        norms = np.sqrt((weight.astype(np.float64) ** 2).sum(axis=1))
        m = (norms * random.uniform(0.8, 1.2, rows)).astype(np.float32)
        found[name.removesuffix(".weight")] = RandomUpdate(a, np.float32(size) * b, m)
    return found


def linear_names(weights: Mapping[str, Any]) -> list[str]:
    """Names of a checkpoint's matrices in layers."""
    return [name for name in weights if ".layers." in name and name.endswith(".weight") and weights[name].ndim == 2]


def save_peft(
    folder: Path,
    updates: Mapping[str, RandomUpdate],
    *,
    dora: bool = False,
    tensors: Mapping[str, mx.array] | None = None,
    **config: Any,
) -> Path:
    """As PEFT saves them. tensors: in the place of those; config: fields in the place of usual ones."""
    made = {}
    for layer, update in updates.items():
        made[f"base_model.model.{layer}.lora_A.weight"] = mx.array(update.a)
        made[f"base_model.model.{layer}.lora_B.weight"] = mx.array(update.b)
        if dora:
            made[f"base_model.model.{layer}.lora_magnitude_vector"] = mx.array(update.m)
    usual = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": SCALE * RANK,
        "use_dora": dora,
        "use_rslora": False,
        "bias": "none",
        "target_modules": sorted({layer.rpartition(".")[2] for layer in updates}),
    }
    return _save(folder, {**usual, **config}, "adapter_model.safetensors", made if tensors is None else tensors)


def save_mlx_lm(
    folder: Path,
    updates: Mapping[str, RandomUpdate],
    *,
    dora: bool = False,
    tensors: Mapping[str, mx.array] | None = None,
    **config: Any,
) -> Path:
    """As mlx-lm's tuner saves them; see `save_peft`."""
    made = {}
    for layer, update in updates.items():
        made[f"{layer}.lora_a"], made[f"{layer}.lora_b"] = mx.array(update.a.T), mx.array(update.b.T)
        if dora:
            made[f"{layer}.m"] = mx.array(update.m)
    usual = {
        "fine_tune_type": "dora" if dora else "lora",
        "lora_parameters": {"rank": RANK, "scale": SCALE, "dropout": 0.0},
        "num_layers": -1,
    }
    return _save(folder, {**usual, **config}, "adapters.safetensors", made if tensors is None else tensors)


def _save(folder: Path, config: Mapping[str, Any], file: str, tensors: Mapping[str, mx.array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / file), dict(tensors), {"format": "pt"})
    return folder
