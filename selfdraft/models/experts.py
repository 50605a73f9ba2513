"""Tensors of experts, from the ways checkpoints store them to one stack a projection. Nothing is evaluated here."""

from __future__ import annotations

import re

import mlx.core as mx

__all__ = ["stack_experts"]

_NUMBERED = re.compile(r"(.*\.)experts\.(\d+)\.(\w+\.\w+)")


def stack_experts(tensors: dict[str, mx.array], into: str = "switch_mlp") -> dict[str, mx.array]:
    """Experts stored one by one or gate and up together, as mlx-lm's switch layers have them.

    `experts.N.gate_proj.weight` [F, H], `experts.gate_up_proj` [E, 2F, H] and `experts.down_proj` [E, H, F] become
    `switch_mlp.gate_proj.weight` [E, F, H] and so on; what is stacked already stays.

    Raises:
        ValueError: experts are missing.
    """
    found: dict[str, dict[int, mx.array]] = {}
    kept: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        if numbered := _NUMBERED.fullmatch(name):
            before, number, part = numbered.groups()
            found.setdefault(f"{before}{into}.{part}", {})[int(number)] = tensor
        elif name.endswith("experts.gate_up_proj"):
            before = name.removesuffix("experts.gate_up_proj") + into
            kept[f"{before}.gate_proj.weight"], kept[f"{before}.up_proj.weight"] = mx.split(tensor, 2, axis=1)
        elif name.endswith("experts.down_proj"):
            kept[name.removesuffix("experts.down_proj") + f"{into}.down_proj.weight"] = tensor
        else:
            kept[name] = tensor
    for name, experts in found.items():
        if missing := sorted(set(range(max(experts) + 1)) - experts.keys()):
            raise ValueError(f"{name} lacks expert {missing[0]}")
        kept[name] = mx.stack([experts[number] for number in range(len(experts))])
    return kept
