"""ERNIE-4.5: trunk by transformers; the module by FastDeploy's formula (`ernie4_5_mtp.py`) on transformers' layers."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeDecoderLayer, Ernie4_5_MoeRMSNorm

from tests.reference.family_references.reference import causal, chained, load_trunk


class Ernie:
    """One module: [norm(embedding); norm(hidden)], projected, through a dense layer, behind the trunk's final norm."""

    def __init__(self, folder: Path) -> None:
        self.model = load_trunk(folder)
        config = self.model.config
        stored = load_file(folder / "model.safetensors")
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = (Ernie4_5_MoeRMSNorm(size, eps) for _ in range(2))
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.block = Ernie4_5_MoeDecoderLayer(config, 0)  # the first layer is dense, as the module is
        parts = {"emb_norm": self.enorm, "hidden_norm": self.hnorm, "linear_proj": self.projection, "block": self.block}
        for name, part in parts.items():
            prefix = f"model.mtp_{name}.0."
            part.load_state_dict({k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)})

    def trunk(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.model(ids[None], use_cache=False).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)

    def output(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.model.model.embed_tokens(tokens)
        x = self.projection(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))[None]
        positions = torch.arange(x.shape[1])[None]
        rotary = self.model.model.rotary_emb(x, positions)
        out: Tensor = self.block(x, attention_mask=causal(x.shape[1]), position_embeddings=rotary)[0]
        return out

    def logits(self, output: Tensor) -> Tensor:
        return self.model.lm_head(self.model.model.norm(output))

    def drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> Tensor:
        return chained(self, ids, hidden, depths)


REFERENCES = {"ernie4_5_moe": Ernie}
