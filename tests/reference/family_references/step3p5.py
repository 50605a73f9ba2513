"""Step-3.5: trunk by the text part of transformers' Step-3.7; the head is vLLM's wiring on its layers.

vllm/model_executor/models/step3p5_mtp.py and step3p5.py: the first module takes the trunk's hidden before the last
norm, each other what the one before it put out before its own; each projects with an output projection of its own.
(transformers' `MtpModel` lacks these projections, and has no `.transformer.` in its names.)
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7DecoderLayer, Step3p7RMSNorm, Step3p7TextModel

from tests.reference.family_references.reference import causal, filled, named, read_json, stacked


def layer_config(config: Step3p7TextConfig, released: dict[str, Any], layer: int) -> Step3p7TextConfig:
    """A config whose layer 0 is this one of config.json."""
    own = copy.deepcopy(config)
    sliding = released["layer_types"][layer] == "sliding_attention"
    own.layer_types, own.mlp_layer_types, own.num_hidden_layers = [released["layer_types"][layer]], ["dense"], 1
    own.swiglu_limits_shared = [released["swiglu_limits_shared"][layer]]
    own.per_layer_config = {0: {"num_attention_heads": own.num_sliding_attention_heads}} if sliding else {}
    return own


class Module(nn.Module):
    """One of the three."""

    def __init__(
        self, model: Step3p7TextModel, config: Step3p7TextConfig, released: dict[str, Any], layer: int
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (Step3p7RMSNorm(hidden, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.output_projection = nn.Linear(hidden, config.vocab_size, bias=False)
        self.layer = Step3p7DecoderLayer(layer_config(config, released, layer), 0)
        self.kind = released["layer_types"][layer]
        self.window = config.sliding_window if self.kind == "sliding_attention" else None
        self._shared = [model]  # a list, so that its parameters are no module's

    def output(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        model = self._shared[0]
        x = self.eh_proj(torch.cat([self.enorm(model.embed_tokens(tokens)), self.hnorm(hidden)], dim=-1))[None]
        rotary = model.rotary_emb(x, torch.arange(tokens.shape[0])[None], self.kind)
        return self.layer(x, attention_mask=causal(x.shape[1], self.window), position_embeddings=rotary)[0]

    def logits(self, output: Tensor) -> Tensor:
        return self.output_projection(self.norm(output))


class Step35:
    """Trunk and modules."""

    def __init__(self, folder: Path) -> None:
        released = read_json(folder / "config.json")
        config = Step3p7TextConfig(**released, attn_implementation="eager")
        tensors = load_file(folder / "model.safetensors")
        layers = config.num_hidden_layers
        modules = [f"model.layers.{layers + index}." for index in range(config.num_nextn_predict_layers)]
        of_trunk = {n: t for n, t in named(tensors, "model.").items() if not f"model.{n}".startswith(tuple(modules))}
        self.model = filled(Step3p7TextModel(config), transformers_names(of_trunk))
        self.norm, self.model.norm = self.model.norm, nn.Identity()
        self.projection = tensors["lm_head.weight"]
        self.modules = [
            filled(Module(self.model, config, released, layers + index), module_names(named(tensors, prefix)))
            for index, prefix in enumerate(modules)
        ]

    def trunk(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model(ids[None], use_cache=False).last_hidden_state[0]
        return hidden, self.norm(hidden) @ self.projection.T

    def drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> Tensor:
        return stacked(self.modules[:depths], ids, hidden)


def transformers_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As transformers' conversion_mapping.py renames and joins them."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".moe.up_proj.weight"):
            continue
        if name.endswith(".moe.gate_proj.weight"):
            stem = name.removesuffix("moe.gate_proj.weight")
            found[f"{stem}mlp.experts.gate_up_proj"] = torch.cat([tensor, tensors[f"{stem}moe.up_proj.weight"]], dim=1)
            continue
        for theirs, ours in (
            (".moe.gate.weight", ".mlp.gate.weight"),
            (".moe.router_bias", ".mlp.gate.e_score_correction_bias"),
            (".moe.down_proj.weight", ".mlp.experts.down_proj"),
            (".share_expert.", ".mlp.shared_experts."),
        ):
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found


def module_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A module's tensors by the names of `Module`."""
    own = {"transformer.shared_head.norm.weight": "norm.weight"}
    own["transformer.shared_head.output.weight"] = "output_projection.weight"
    outside = ("enorm.", "hnorm.", "eh_proj.")
    return {
        own.get(name, name if name.startswith(outside) else f"layer.{name}"): tensor for name, tensor in tensors.items()
    }


REFERENCES = {"step3p5": Step35}
