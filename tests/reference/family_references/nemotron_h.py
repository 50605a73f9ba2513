"""Nemotron-H: trunk by transformers; the head by vLLM's formula (`nemotron_h_mtp.py`) on transformers' layers."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

from tests.reference.family_references.reference import causal, chained, load_trunk


class NemotronH:
    """[norm(embedding); norm(hidden)], projected, through the head's layers and its last norm."""

    def __init__(self, folder: Path) -> None:
        self.model = load_trunk(folder)
        config = deepcopy(self.model.config)
        config.layers_block_type = config.mtp_layers_block_type
        stored = load_file(folder / "model.safetensors")
        size, eps = config.hidden_size, config.layer_norm_epsilon
        self.enorm, self.hnorm, self.norm = (NemotronHRMSNorm(size, eps) for _ in range(3))
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.layers = [NemotronHBlock(config, layer) for layer in range(len(config.layers_block_type))]
        last = len(self.layers) - 1
        parts = {"0.enorm": self.enorm, "0.hnorm": self.hnorm, "0.eh_proj": self.projection}
        for name, part in {**parts, f"{last}.final_layernorm": self.norm}.items():
            part.load_state_dict({"weight": stored[f"mtp.layers.{name}.weight"]})
        for index, layer in enumerate(self.layers):
            prefix = f"mtp.layers.{index}."
            layer.load_state_dict(
                {name: _tensor(name, prefix, stored, config.n_routed_experts) for name in layer.state_dict()}
            )

    def trunk(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.model(ids[None], use_cache=False).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)

    def output(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.model.model.embeddings(tokens)
        x = self.projection(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))[None]
        for layer in self.layers:
            x = layer(x, attention_mask=causal(x.shape[1]) if layer.block_type == "full_attention" else None)
        out: Tensor = self.norm(x)[0]
        return out

    def logits(self, output: Tensor) -> Tensor:
        return self.model.lm_head(output)

    def drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> Tensor:
        return chained(self, ids, hidden, depths)


def _tensor(name: str, prefix: str, stored: dict[str, Tensor], experts: int) -> Tensor:
    """A layer's tensor; those of experts are stored one by one."""
    before, found, part = name.partition("experts.")
    if not found or before.endswith("shared_"):
        return stored[prefix + name]
    return torch.stack([stored[f"{prefix}{before}experts.{expert}.{part}.weight"] for expert in range(experts)])


REFERENCES = {"nemotron_h": NemotronH, "nemotron_h_latent": NemotronH}
