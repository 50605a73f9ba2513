"""MiMo-V2-Flash: trunk by transformers; the head is SGLang's wiring on its layers.

python/sglang/srt/models/mimo_v2_nextn.py and speculative/multi_layer_eagle_worker_v2.py: every module takes the trunk's
hidden before the last norm, and the tokens one further on than those of the module before it.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashDecoderLayer, MiMoV2FlashRMSNorm

from tests.reference.family_references.reference import causal, filled, load_trunk, named, read_json, side_by_side

MODULES = 3
KIND = "sliding_attention"


def configuration(folder: Path) -> MiMoV2FlashConfig:
    """The released fields, under the names that transformers has for them."""
    released = read_json(folder / "config.json")
    theta = {"full_attention": released["rope_theta"], KIND: released["swa_rope_theta"]}
    rotary = {"rope_type": "default", "partial_rotary_factor": released["partial_rotary_factor"]}
    return MiMoV2FlashConfig.from_pretrained(
        folder,
        rms_norm_eps=released["layernorm_epsilon"],
        layer_types=[KIND if slides else "full_attention" for slides in released["hybrid_layer_pattern"]],
        mlp_layer_types=["sparse" if experts else "dense" for experts in released["moe_layer_freq"]],
        rope_parameters={kind: {**rotary, "rope_theta": base} for kind, base in theta.items()},
    )


class Module(nn.Module):
    """One of the three."""

    def __init__(self, config: MiMoV2FlashConfig, model: MiMoV2FlashForCausalLM) -> None:
        super().__init__()
        hidden = config.hidden_size
        own = copy.deepcopy(config)
        own.layer_types, own.mlp_layer_types = [KIND], ["dense"]
        self.enorm, self.hnorm, self.final_layernorm = (
            MiMoV2FlashRMSNorm(hidden, config.rms_norm_eps) for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = MiMoV2FlashDecoderLayer(own, 0)
        self.window = config.sliding_window
        self._shared = [model]  # a list, so that its parameters are no module's

    def output(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        model = self._shared[0].model
        x = self.eh_proj(torch.cat([self.enorm(model.embed_tokens(tokens)), self.hnorm(hidden)], dim=-1))[None]
        rotary = model.rotary_emb(x, torch.arange(tokens.shape[0])[None], KIND)
        return self.layer(x, attention_mask=causal(x.shape[1], self.window), position_embeddings=rotary)[0]

    def logits(self, output: Tensor) -> Tensor:
        return self._shared[0].lm_head(self.final_layernorm(output))


class MiMoV2Flash:
    """Trunk and modules."""

    def __init__(self, folder: Path) -> None:
        config = configuration(folder)
        config._attn_implementation = "eager"
        self.model = load_trunk(folder, config)
        self.norm, self.model.model.norm = self.model.model.norm, nn.Identity()
        tensors = load_file(folder / "model.safetensors")
        self.modules = [
            filled(Module(config, self.model), renamed(named(tensors, f"model.mtp.layers.{index}.")))
            for index in range(MODULES)
        ]

    def trunk(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.model(ids[None], use_cache=False).last_hidden_state[0]
        return hidden, self.model.lm_head(self.norm(hidden))

    def drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> Tensor:
        return side_by_side(self.modules[:depths], ids, hidden)


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A module's tensors by the names of `Module`."""
    found = {}
    for name, tensor in tensors.items():
        of_layer = name.startswith(("self_attn.", "mlp.", "input_layernorm.", "pre_mlp_layernorm."))
        name = name.replace("pre_mlp_layernorm", "post_attention_layernorm").replace("attention_sink_bias", "sinks")
        found[f"layer.{name}" if of_layer else name] = tensor
    return found


REFERENCES = {"mimo_v2_flash": MiMoV2Flash}
