"""MiMo-7B: its trunk is transformers' Qwen2; its head is the published formula on a layer of Qwen2's.

https://huggingface.co/XiaomiMiMo/MiMo-7B-RL, modeling_mimo.py: MiMoMTPLayers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from tests.reference.family_references.reference import causal, chained, filled, named

MODULE = "model.mtp_layers.0."


class MiMo:
    """Qwen2's layers, and one more behind [hidden; embedding]."""

    def __init__(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        config = Qwen2Config.from_pretrained(folder, attn_implementation="eager")
        self.model = filled(Qwen2ForCausalLM(config), {n: t for n, t in tensors.items() if not n.startswith(MODULE)})
        module = named(tensors, MODULE)
        hidden = config.hidden_size
        self.embedding_norm, self.hidden_norm, self.final_norm = (
            filled(Qwen2RMSNorm(hidden, config.rms_norm_eps), named(module, f"{name}_layernorm."))
            for name in ("token", "hidden", "final")
        )
        self.projection = filled(nn.Linear(2 * hidden, hidden, bias=False), named(module, "input_proj."))
        own = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
        self.layer = filled(Qwen2DecoderLayer(config, 0), {n: t for n, t in module.items() if n.startswith(own)})

    def trunk(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.model(ids[None], use_cache=False).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)

    def output(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embeddings = self.model.model.embed_tokens(tokens)
        x = self.projection(torch.cat([self.hidden_norm(hidden), self.embedding_norm(embeddings)], dim=-1))[None]
        positions = torch.arange(tokens.shape[0])[None]
        return self.layer(
            x, attention_mask=causal(x.shape[1]), position_embeddings=self.model.model.rotary_emb(x, positions)
        )[0]

    def logits(self, output: Tensor) -> Tensor:
        return self.model.lm_head(self.final_norm(output))

    def drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> Tensor:
        assert depths == 1, "trained for one step"
        return chained(self, ids, hidden, depths)


REFERENCES = {"mimo": MiMo}
