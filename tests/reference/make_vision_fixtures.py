"""Writes what transformers computes from the tiny random checkpoints of `vision_checkpoints` in float32.

    python tests/reference/make_vision_fixtures.py [FOLDER]

A file NAME.safetensors a checkpoint; H is the hidden size, V the vocabulary, n the length of the prompt, which has two
pictures between text:

    ids             int32   [n]
    grids           int32   [2, 2]      height and width of each picture in patches
    patches.N       float32 [patches, 96]   of picture N, by the processor that needs Pillow alone
    features.N      float32 [tokens, H]     the tower's
    positions       int32   [3, n]      time, height, width
    rope_delta      int32   [1]
    trunk_logits    float32 [m, V]      of every fifth position and the last
    mtp_logits      float32 [3, V]      of draft 1, 2, 3, each behind the ones before it
    mtp_drafts      int32   [3]

The head's entry i is made of the embedding of token i + 1, spliced, and of the trunk's hidden i, at the position of
token i.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.reference.family_references.qwen3_5_moe import fused
from tests.reference.vision_checkpoints import (
    CHECKPOINTS,
    IMAGE,
    PREPROCESSOR,
    SIZES,
    VisionCheckpoint,
    picture,
    prompt,
)

DEPTHS = 3
EVERY = 5
SMALLEST_DRAFT_MARGIN = 0.1  # a draft must not hang on rounding
LAYER = "mtp.layers.0."

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "vision"

KINDS: dict[str, Any] = {
    "dense": (Qwen3_5ForConditionalGeneration, Qwen3_5DecoderLayer, Qwen3_5RMSNorm),
    "experts": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm),
}


class Reference:
    """A model of transformers, and a head of its layers over the whole history at every call."""

    def __init__(self, name: str, folder: Path) -> None:
        kind, layer, norm = KINDS[name]
        self.model, report = kind.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        left_over = [name for name in report["unexpected_keys"] if not name.startswith("mtp.")]
        if report["missing_keys"] or report["mismatched_keys"] or left_over:
            raise ValueError(f"{name}: transformers did not read the checkpoint as a whole: {report}")
        self.model.eval()
        weights = load_file(folder / "model.safetensors")
        config = copy.deepcopy(self.model.config.text_config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        self.layer = layer(config, layer_idx=0).float().eval()
        own = {name.removeprefix(LAYER): value for name, value in weights.items() if name.startswith(LAYER)}
        self.layer.load_state_dict(fused(own) if name == "experts" else own)
        self.projection = weights["mtp.fc.weight"]
        self.norms = torch.nn.ModuleDict()
        for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[part] = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.norms[part].load_state_dict({"weight": weights[f"mtp.{part}.weight"]})

    def last_output(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The head's normed output [H] of the last entry."""
        length = embeddings.shape[0]
        both = [self.norms["pre_fc_norm_embedding"](embeddings), self.norms["pre_fc_norm_hidden"](hidden)]
        entries = (torch.cat(both, dim=-1) @ self.projection.T)[None]
        future = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
        output = self.layer(
            entries,
            position_embeddings=self.model.model.language_model.rotary_emb(entries, positions[:, None]),
            attention_mask=torch.zeros(length, length).masked_fill(future, float("-inf"))[None, None],
        )
        return self.norms["norm"](output[0, -1])

    def drafts(self, spliced: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Logits [DEPTHS, V] of drafts, each behind the ones before it."""
        embeddings, hiddens, places = spliced[1:], hidden[:-1], positions[:, :-1]
        logits = []
        for _ in range(DEPTHS):
            output = self.last_output(embeddings, hiddens, places)
            logits.append(self.model.lm_head(output))
            best, second = logits[-1].topk(2).values.tolist()
            if best - second < SMALLEST_DRAFT_MARGIN:
                raise ValueError(f"a draft hangs on a margin of {best - second:.4f}: choose another seed")
            drafted = self.model.get_input_embeddings()(logits[-1].argmax()[None])
            embeddings, hiddens = torch.cat([embeddings, drafted]), torch.cat([hiddens, output[None]])
            places = torch.cat([places, places[:, -1:] + 1], dim=1)
        return torch.stack(logits)


def expected_values(checkpoint: VisionCheckpoint, folder: Path) -> dict[str, Tensor]:
    """The tensors of a fixture (see the module's docstring)."""
    reference = Reference(checkpoint.name, folder)
    model = reference.model
    processor = Qwen2VLImageProcessorPil(**{k: v for k, v in PREPROCESSOR.items() if k != "image_processor_type"})
    seen = [processor([picture(*size)], return_tensors="pt") for size in SIZES]
    patches, grids = [each["pixel_values"] for each in seen], torch.cat([each["image_grid_thw"] for each in seen])
    features = [
        model.model.get_image_features(pixels, grid[None]).pooler_output
        for pixels, grid in zip(patches, grids, strict=True)
    ]
    features = [each[0] if isinstance(each, (list, tuple)) else each for each in features]
    ids = torch.from_numpy(prompt([len(each) for each in features]))
    positions, delta = model.model.get_rope_index(ids[None], (ids == IMAGE).int()[None], image_grid_thw=grids)
    hidden = model.model(
        input_ids=ids[None],
        pixel_values=torch.cat(patches),
        image_grid_thw=grids,
        mm_token_type_ids=(ids == IMAGE).int()[None],
        use_cache=False,
    ).last_hidden_state[0]
    spliced = model.get_input_embeddings()(ids)
    spliced[ids == IMAGE] = torch.cat(features)
    mtp_logits = reference.drafts(spliced, hidden, positions[:, 0])
    kept = sorted({*range(0, len(ids), EVERY), len(ids) - 1})
    return {
        "ids": ids.int(),
        "grids": grids[:, 1:].int().clone(),
        "positions": positions[:, 0].int().clone(),
        "rope_delta": delta.flatten().int().clone(),
        "trunk_logits": model.lm_head(hidden)[kept],
        "mtp_logits": mtp_logits,
        "mtp_drafts": mtp_logits.argmax(-1).int(),
        **{f"patches.{index}": pixels.contiguous() for index, pixels in enumerate(patches)},
        **{f"features.{index}": each.contiguous() for index, each in enumerate(features)},
    }


def write_checkpoint(checkpoint: VisionCheckpoint, folder: Path) -> None:
    """As Hugging Face stores it."""
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in checkpoint.weights().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def main(folder: Path) -> None:
    disable_progress_bar()
    torch.set_num_threads(1)  # the order of additions must not depend on the number of cores
    folder.mkdir(parents=True, exist_ok=True)
    for checkpoint in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as scratch:
            write_checkpoint(checkpoint, Path(scratch))
            save_file(expected_values(checkpoint, Path(scratch)), folder / f"{checkpoint.name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER)
