"""What every reference says, and the drafting that most of them share: over the whole history, without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

__all__ = ["Reference", "TransformersModules", "causal", "chained", "load_trunk", "stacked"]


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


def load_trunk(folder: Path) -> Any:
    """A causal language model in float32, read by transformers; raises if a tensor of the trunk is missing."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            raise ValueError(f"{folder}: {kind}: {sorted(report[kind])[:5]}")
    return model.eval()


def causal(tokens: int) -> Tensor:
    """What is added to scores so that each token sees those before it, [1, 1, n, n]."""
    return torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]


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


class TransformersModules:
    """The layers of transformers' `MtpModel`, for families whose heads it reads."""

    def __init__(self, folder: Path) -> None:
        self.model = load_trunk(folder)
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
