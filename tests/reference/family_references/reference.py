"""What every reference says, and the drafting that most of them share: over the whole history, without any cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

__all__ = [
    "Reference",
    "TransformersModules",
    "causal",
    "chained",
    "filled",
    "load_trunk",
    "named",
    "read_json",
    "side_by_side",
    "stacked",
]

Filled = TypeVar("Filled", bound=nn.Module)


class Reference(Protocol):
    """A trunk and its head."""

    def trunk(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden [n, H] that the head takes, and logits [n, V], of ids [n]."""

    def drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> Tensor:
        """Logits [depths, V] of greedy drafts behind ids [n], with the trunk's hidden [n, H]."""


class Module(Protocol):
    """One MTP module, run over a whole history."""

    def output(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What it hands on, [n, H], for entries (hidden[i], tokens[i]) at positions 0..n-1."""

    def logits(self, output: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""


def load_trunk(folder: Path, config: Any = None) -> Any:
    """A causal language model in float32, read by transformers; raises if a tensor of the trunk is missing.

    Args:
        config: where transformers does not read config.json as it was released.
    """
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise ValueError(f"{folder}: {kind}: {sorted(report[kind])[:5]}")
    return model.eval()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def filled(module: Filled, tensors: Mapping[str, Tensor]) -> Filled:
    """A module with these as all of its parameters, in float32."""
    module.to(torch.float32).load_state_dict(dict(tensors), strict=True)
    return module.eval()


def named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin so, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def causal(length: int, window: int | None = None) -> Tensor:
    """What eager attention adds to scores, [1, 1, n, n]: a query sees the last `window` positions, its own included."""
    places = torch.arange(length)
    distance = places[:, None] - places[None]
    seen = (distance >= 0) & (distance < (window or length))
    return torch.where(seen, 0.0, -torch.inf)[None, None]


def chained(module: Module, ids: Tensor, hidden: Tensor, depths: int) -> Tensor:
    """One module for all depths: each draft's entry stands behind the ones before it, with the module's own output."""
    tokens, before = ids[1:], hidden[:-1]
    found = []
    for _ in range(depths):
        output = module.output(tokens, before)
        found.append(module.logits(output[-1]))
        tokens, before = torch.cat([tokens, found[-1].argmax()[None]]), torch.cat([before, output[-1:]])
    return torch.stack(found)


def stacked(modules: Sequence[Module], ids: Tensor, hidden: Tensor) -> Tensor:
    """A module a depth (arXiv 2412.19437, section 2.2): module k takes what module k - 1 put out for the same entry,
    and tokens that are one further on."""
    tokens, before = ids[1:], hidden[:-1]
    found = []
    for module in modules:
        before = module.output(tokens, before)
        found.append(module.logits(before[-1]))
        tokens = torch.cat([tokens[1:], found[-1].argmax()[None]])
    return torch.stack(found)


def side_by_side(modules: Sequence[Module], ids: Tensor, hidden: Tensor) -> Tensor:
    """A module a depth, each with the trunk's hidden, and tokens one further on than those of the one before it."""
    tokens = ids[1:]
    found = []
    for module in modules:
        found.append(module.logits(module.output(tokens, hidden[:-1])[-1]))
        tokens = torch.cat([tokens[1:], found[-1].argmax()[None]])
    return torch.stack(found)


class TransformersModules:
    """The layers of transformers' `MtpModel`, for families whose heads it reads.

    Args:
        settings: of the head, where a family's configuration does not say them.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.model = load_trunk(folder)
        for name, value in settings.items():
            setattr(self.model.config, name, value)
        # transformers knows the heads of released checkpoints by the numbers of their layers.
        self.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{self.model.config.num_hidden_layers}\."]
        self.mtp = MtpModel.from_pretrained(self.model)

    def trunk(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.get_decoder()(ids[None], use_cache=False).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)

    def run(self, layer: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """A layer's output behind its last norm, [n, H]."""
        positions = torch.arange(1, tokens.shape[0] + 1)[None]
        return self.mtp.forward_layer(layer, hidden[None], positions, None, input_ids=tokens[None])[0]
