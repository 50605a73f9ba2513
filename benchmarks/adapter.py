"""Trains a LoRA adapter for a model with mlx-lm's tuner, on the texts of Python's own language reference.

What `selfdraft bench --adapter-path` measures of such an adapter is kept in benchmarks/results. Paragraphs of
`pydoc_data.topics`, which comes with every Python; each tenth is held out for the loss that is printed.

    usage: adapter.py FOLDER [--model FOLDER] [--steps N] [--type lora|dora]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selfdraft.device import choose_blas
from selfdraft.source import find_model

LETTERS = (100, 260)  # of a paragraph: some 25 to 80 tokens, so that a step on a CPU takes seconds


def main() -> None:
    options = _options()
    choose_blas("auto")  # before MLX comes in
    import mlx.core as mx
    from mlx_lm.lora import train_model
    from mlx_lm.tuner.datasets import TextDataset
    from mlx_lm.utils import load

    folder = find_model(options.model)
    model, tokenizer = load(str(folder))[:2]
    model.set_dtype(mx.float32)  # which a CPU multiplies faster than bf16
    train, held_out = (TextDataset([{"text": text} for text in texts], tokenizer) for texts in _paragraphs())
    train_model(_settings(options, folder), model, train, held_out)


def _paragraphs() -> tuple[list[str], list[str]]:
    """Those to train on, and those that are held out."""
    from pydoc_data.topics import topics

    texts = [" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n")]
    fitting = [text for text in texts if LETTERS[0] <= len(text) <= LETTERS[1]]
    return [text for place, text in enumerate(fitting) if place % 10], fitting[::10]


def _settings(options: argparse.Namespace, folder: Path) -> Any:
    """What `mlx_lm.lora` takes, with its own defaults but for length, steps and rate."""
    from mlx_lm.lora import CONFIG_DEFAULTS

    ours = {
        "model": options.model,
        "fine_tune_type": options.type,
        "num_layers": json.loads((folder / "config.json").read_text())["text_config"]["num_hidden_layers"],
        "batch_size": 4,
        "iters": options.steps,
        "learning_rate": 2e-4,
        "max_seq_length": 96,
        "steps_per_report": 20,
        "steps_per_eval": 100,
        "val_batches": 8,
        "adapter_path": str(options.folder),
    }
    return SimpleNamespace(**{**CONFIG_DEFAULTS, **ours})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the adapter goes")
    parser.add_argument("--model", default="reference")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--type", choices=("lora", "dora"), default="lora")
    return parser.parse_args()


if __name__ == "__main__":
    main()
