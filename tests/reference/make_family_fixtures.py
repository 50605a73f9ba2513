"""Writes what `family_references` computes from the tiny random checkpoints of `families`.

    python tests/reference/make_family_fixtures.py [--folder FOLDER] [NAME ...]

A file NAME.safetensors a family; H is the hidden size, V the vocabulary, n the length of the prompt:

    ids            int32   [n]
    trunk_hidden   float32 [8, H]   the last 8 positions, as the head takes it
    trunk_logits   float32 [8, V]
    mtp_logits     float32 [D, V]   of draft 1, 2, ... D, each behind the ones before it
    mtp_drafts     int32   [D]      argmax of each row
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.reference.families import FAMILIES, Family
from tests.reference.family_references import reference_of

LENGTH = 99  # more than one window, and no multiple of any usual chunk size
POSITIONS_KEPT = 8
SMALLEST_DRAFT_MARGIN = 0.1  # a draft must not hang on rounding

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "families"


def write_checkpoint(family: Family, folder: Path) -> None:
    """As Hugging Face stores it."""
    (folder / "config.json").write_text(json.dumps(family.config))
    tensors = {name: torch.from_numpy(values) for name, values in family.weights().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if family.assistant:
        (folder / "assistant").mkdir()
        write_checkpoint(family.assistant, folder / "assistant")


def expected_values(family: Family, folder: Path) -> dict[str, Tensor]:
    """The tensors of a fixture (see the module's docstring)."""
    reference = reference_of(family.name, folder)
    ids = torch.from_numpy(family.prompt(LENGTH))
    hidden, logits = reference.trunk(ids)
    drafted = reference.drafts(ids, hidden, family.depths)
    best = drafted.topk(2).values
    if (margin := float((best[:, 0] - best[:, 1]).min())) < SMALLEST_DRAFT_MARGIN:
        raise ValueError(f"{family.name}: a draft hangs on a margin of {margin:.4f}: choose another seed")
    return {
        "ids": ids.int(),
        "trunk_hidden": hidden[-POSITIONS_KEPT:].clone(),
        "trunk_logits": logits[-POSITIONS_KEPT:].clone(),
        "mtp_logits": drafted,
        "mtp_drafts": drafted.argmax(-1).int(),
    }


@torch.no_grad()
def main(names: list[str], folder: Path) -> None:
    disable_progress_bar()
    torch.set_num_threads(1)  # the order of additions must not depend on the number of cores
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            write_checkpoint(FAMILIES[name], Path(scratch))
            save_file(expected_values(FAMILIES[name], Path(scratch)), folder / f"{name}.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *FAMILIES])
    given = parser.parse_args()
    main(given.names, given.folder)
