"""Qwen3-Next and Qwen3.5 MoE: trunks by transformers; heads by their published formula on a layer of transformers.

Entry i is fc([norm(embedding of t_{i+1}); norm(trunk's hidden i)]) at position i, behind it one full-attention layer
and a norm. A deeper draft's entry takes the head's own normed output.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from tests.reference.family_references.reference import chained, load_trunk

LAYER = "mtp.layers.0."


def fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts stored one by one, as transformers' layers have them."""
    kept = {name: value for name, value in weights.items() if not re.match(r"mlp\.experts\.\d", name)}
    count = weights["mlp.gate.weight"].shape[0]
    gate, up, down = (
        torch.stack([weights[f"mlp.experts.{expert}.{kind}_proj.weight"] for expert in range(count)])
        for kind in ("gate", "up", "down")
    )
    return kept | {"mlp.experts.gate_up_proj": torch.cat([gate, up], dim=1), "mlp.experts.down_proj": down}


class FullAttentionHead:
    """The head, over its whole history at every call."""

    layer_kind: type[nn.Module] = Qwen3_5MoeDecoderLayer
    norm_kind: type[nn.Module] = Qwen3_5MoeRMSNorm

    def __init__(self, folder: Path) -> None:
        self.model = load_trunk(folder)
        weights = load_file(folder / "model.safetensors")
        config = copy.deepcopy(self.model.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        if hasattr(config, "mlp_only_layers"):  # the head has experts, whichever layers of the trunk have none
            config.mlp_only_layers, config.decoder_sparse_step = [], 1
        self.layer = self.layer_kind(config, layer_idx=0).float().eval()
        self.layer.load_state_dict(
            fused({name.removeprefix(LAYER): value for name, value in weights.items() if name.startswith(LAYER)})
        )
        self.projection = weights["mtp.fc.weight"]
        self.norms = nn.ModuleDict()
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = self.norm_kind(config.hidden_size, eps=config.rms_norm_eps)
            self.norms[name].load_state_dict({"weight": weights[f"mtp.{name}.weight"]})

    def trunk(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.get_decoder()(ids[None], use_cache=False).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)

    def output(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        length = tokens.shape[0]
        embedded = self.norms["pre_fc_norm_embedding"](self.model.get_input_embeddings()(tokens))
        entries = torch.cat([embedded, self.norms["pre_fc_norm_hidden"](hidden)], dim=-1) @ self.projection.T
        future = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
        positions = self.positions(length)
        output = self.layer(
            entries[None],
            position_embeddings=self.model.get_decoder().rotary_emb(entries[None], positions),
            attention_mask=torch.zeros(length, length).masked_fill(future, float("-inf"))[None, None],
        )
        return self.norms["norm"](output[0])

    def positions(self, length: int) -> Tensor:
        """Of text, for each of the three axes of an image."""
        return torch.arange(length).expand(3, 1, length)

    def logits(self, output: Tensor) -> Tensor:
        return self.model.lm_head(output)

    def drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> Tensor:
        return chained(self, ids, hidden, depths)


class Qwen3NextHead(FullAttentionHead):
    """With one axis of positions."""

    layer_kind = Qwen3NextDecoderLayer
    norm_kind = Qwen3NextRMSNorm

    def positions(self, length: int) -> Tensor:
        return torch.arange(length)[None]


REFERENCES = {
    "qwen3_5_moe": FullAttentionHead,
    "qwen3_next": Qwen3NextHead,
    "qwen3_next_dense_layers": Qwen3NextHead,
}
