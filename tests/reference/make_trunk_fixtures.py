"""Writes tiny random Qwen3.5 checkpoints and what `transformers` computes from them in float32.

Knows nothing of Selfdraft, so that it is an independent reference.  The trunk's values come from
`Qwen3_5ForCausalLM`; the head's from a transformers decoder layer that is run over its whole explicit history for
every draft, without any cache.

    python tests/reference/make_trunk_fixtures.py [FOLDER]

The checkpoints are those of `random_checkpoints.py`; each variant becomes a file VARIANT.safetensors.  H is the
hidden size, V the vocabulary, n the length of the long prompt:

    short.ids            int32   [7]       long.ids            int32   [n]
    short.trunk_hidden   float32 [7, H]    long.trunk_hidden   float32 [8, H]   the last 8 positions
    short.trunk_logits   float32 [7, V]    long.trunk_logits   float32 [8, V]   the last 8 positions
    long.mtp_hidden      float32 [3, H]    row k-1 is draft depth k
    long.mtp_logits      float32 [3, V]
    long.mtp_drafts      int32   [3]       argmax of each row of long.mtp_logits

Hiddens are those after the final norm (`model.norm`, `mtp.norm`).  The head's history holds the entries
j = 0..n-2, each made from (embedding of ids[j+1], trunk hidden j) at rotary position j.  Depth 1 is the
output of entry n-2; depth k > 1 is the output of the entry (embedding of draft k-1, head hidden of depth k-1)
at position n-3+k.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from random_checkpoints import VARIANTS, VOCABULARY, Variant, full_config, make_weights, stored_as
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)
from transformers.utils.logging import disable_progress_bar

SHORT_LENGTH = 7
LONG_LENGTH = 99  # more than one chunk of 64, and no multiple of any usual chunk size
LONG_POSITIONS_KEPT = 8
DEPTHS = 3
SMALLEST_DRAFT_MARGIN = 0.2  # a draft must not hang on rounding

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "trunk"


# ---- the reference values


def load_trunk(folder: Path) -> Qwen3_5ForCausalLM:
    """The trunk in float32, read by transformers; raises if a tensor is missing or left over."""
    model, report = Qwen3_5ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    not_trunk = ("mtp.", "model.visual.", "visual.")
    left_over = [name for name in report["unexpected_keys"] if not name.startswith(not_trunk)]
    if report["missing_keys"] or report["mismatched_keys"] or left_over:
        raise ValueError(f"{folder.name}: transformers did not read the checkpoint as a whole: {report}")
    return model.eval()


class HeadReference:
    """The MTP head as one transformers decoder layer that sees its whole history at every call.

    Args:
        config: the text configuration.
        weights: the checkpoint's tensors in float32.
        embed: token ids [T] -> embeddings [T, H] (the trunk's).
        project: hiddens [T, H] -> logits [T, V] (the trunk's output projection).
    """

    def __init__(
        self,
        config: Qwen3_5TextConfig,
        weights: dict[str, Tensor],
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
    ) -> None:
        config = copy.deepcopy(config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        config._attn_implementation = "eager"
        self.embed, self.project = embed, project
        self.input_projection = weights["mtp.fc.weight"]
        self.layer = Qwen3_5DecoderLayer(config, layer_idx=0).float().eval()
        prefix = "mtp.layers.0."
        self.layer.load_state_dict(
            {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        )
        self.rotary = Qwen3_5TextRotaryEmbedding(config)
        self.norms = torch.nn.ModuleDict()
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.norms[name].load_state_dict({"weight": weights[f"mtp.{name}.weight"]})

    def last_output(self, tokens: Tensor, hiddens: Tensor) -> Tensor:
        """Normed output [H] of the last of the entries (tokens[j], hiddens[j]) at positions j = 0..T-1."""
        length = tokens.shape[0]
        embedded = self.norms["pre_fc_norm_embedding"](self.embed(tokens))
        normed = self.norms["pre_fc_norm_hidden"](hiddens)
        entries = torch.cat([embedded, normed], dim=-1) @ self.input_projection.T
        positions = torch.arange(length)[None]
        future = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
        mask = torch.zeros(length, length).masked_fill(future, float("-inf"))[None, None]
        output = self.layer(
            entries[None],
            position_embeddings=self.rotary(entries[None], positions[None]),
            attention_mask=mask,
        )
        return self.norms["norm"](output[0, -1])

    def draft(self, ids: Tensor, trunk_hiddens: Tensor, depths: int) -> tuple[Tensor, Tensor, Tensor]:
        """Argmax drafts after the prompt `ids` [n] with trunk hiddens [n, H].

        Returns hiddens [depths, H], logits [depths, V] and drafts [depths].
        """
        tokens, hiddens = ids[1:], trunk_hiddens[:-1]
        all_hiddens, all_logits, drafts = [], [], []
        for _ in range(depths):
            hidden = self.last_output(tokens, hiddens)
            logits = self.project(hidden[None])[0]
            best, second = logits.topk(2).values.tolist()
            if best - second < SMALLEST_DRAFT_MARGIN:
                raise ValueError(f"a draft hangs on a margin of {best - second:.4f}: choose another seed")
            all_hiddens.append(hidden)
            all_logits.append(logits)
            drafts.append(logits.argmax())
            tokens, hiddens = torch.cat([tokens, drafts[-1][None]]), torch.cat([hiddens, hidden[None]])
        return torch.stack(all_hiddens), torch.stack(all_logits), torch.stack(drafts)


def expected_values(variant: Variant, folder: Path) -> dict[str, Tensor]:
    """The tensors of expected.safetensors (see the module's docstring)."""
    trunk = load_trunk(folder)
    random = np.random.RandomState(variant.seed + 1)
    short = torch.from_numpy(random.randint(0, VOCABULARY, SHORT_LENGTH))
    long = torch.from_numpy(random.randint(0, VOCABULARY, LONG_LENGTH))
    short_hidden = trunk.model(short[None], use_cache=False).last_hidden_state[0]
    long_hidden = trunk.model(long[None], use_cache=False).last_hidden_state[0]
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    head = HeadReference(trunk.config, weights, trunk.model.embed_tokens, trunk.lm_head)
    head_hidden, head_logits, drafts = head.draft(long, long_hidden, DEPTHS)
    kept = long_hidden[-LONG_POSITIONS_KEPT:]
    return {
        "short.ids": short.int(),
        "short.trunk_hidden": short_hidden,
        "short.trunk_logits": trunk.lm_head(short_hidden),
        "long.ids": long.int(),
        "long.trunk_hidden": kept.clone(),
        "long.trunk_logits": trunk.lm_head(kept),
        "long.mtp_hidden": head_hidden,
        "long.mtp_logits": head_logits,
        "long.mtp_drafts": drafts.int(),
    }


def write_checkpoint(variant: Variant, folder: Path) -> None:
    """Writes the checkpoint as Hugging Face stores it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(full_config(variant)))
    weights = {
        name: torch.from_numpy(values).to(getattr(torch, stored_as(variant, name)))
        for name, values in make_weights(variant).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def main(folder: Path) -> None:
    disable_progress_bar()
    # The order of additions, and so the bytes of the files, must not depend on the number of cores.
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for variant in VARIANTS:
            checkpoint = Path(scratch) / variant.name
            write_checkpoint(variant, checkpoint)
            save_file(expected_values(variant, checkpoint), folder / f"{variant.name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER)
