"""Gemma 4: trunk and assistant by transformers.

The assistant is given the keys and values that its query sees: of sliding layers those that a layer with that window
sees from its position. transformers' mask, which is wider by two, then hides none.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM

from tests.reference.family_references.reference import load_trunk


class Gemma4:
    """A trunk, and the assistant in a folder below it."""

    def __init__(self, folder: Path) -> None:
        self.model = load_trunk(folder)
        self.text = self.model.get_decoder()
        self.assistant = Gemma4AssistantForCausalLM.from_pretrained(
            folder / "assistant", dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def trunk(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        out = self.text(ids[None], use_cache=False, return_shared_kv_states=True)
        self.held = out.shared_kv_states
        hidden = out.last_hidden_state[0]
        logits = self.model.lm_head(hidden)
        cap = self.text.config.final_logit_softcapping
        return hidden, logits if cap is None else torch.tanh(logits / cap) * cap

    def drafts(self, ids: Tensor, hidden: Tensor, depths: int) -> Tensor:
        position, window = len(ids) - 1, self.text.config.sliding_window
        firsts = {"full_attention": 0, "sliding_attention": max(position - window + 1, 0)}
        seen = {kind: tuple(part[:, :, firsts[kind] : position] for part in self.held[kind]) for kind in firsts}
        token, before, found = ids[-1], hidden[position - 1], []
        for _ in range(depths):
            pair = torch.cat([self.text.embed_tokens(token), before])[None, None]
            out = self.assistant(inputs_embeds=pair, position_ids=torch.tensor([[position]]), shared_kv_states=seen)
            logits = out.logits[0, 0]
            if self.assistant.masked_embedding is not None:  # what is not scored has one value below all others
                logits = torch.where(logits > logits.min(), logits, -torch.inf)
            token, before = logits.argmax(), out.last_hidden_state[0, 0]
            found.append(logits)
        return torch.stack(found)


REFERENCES = {"gemma4": Gemma4, "gemma4_experts": Gemma4}
