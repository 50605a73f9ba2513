"""What a LoRA adapter does to acceptance: trains one with mlx-lm's tuner, and measures it as it learns.

It learns paragraphs of Python's own language reference (`pydoc_data.topics`, which comes with every Python); each tenth
is held out. Measured of the adapter after every 100 steps, and of the model without: the loss of what was held out, and
how the head's drafts fare at depth 3 on the prompts of `selfdraft bench`. Counts alone, no speed.

    usage: adapter.py train FOLDER [--model NAME] [--steps N] [--type lora|dora]
           adapter.py measure FOLDER [--model NAME] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selfdraft import load
from selfdraft.device import choose_blas
from selfdraft.settings import load_settings
from selfdraft.source import find_model

LETTERS = (100, 260)  # of a paragraph: some 25 to 80 tokens, so that a step on a CPU takes seconds
EVERY = 100  # steps between the states that are kept
PROMPTS, TOKENS = 4, 48  # of `selfdraft bench`


def main() -> None:
    options = _options()
    if options.what == "train":
        _train(options)
        return
    report = _measured(options)
    print(json.dumps(report, indent=1))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _train(options: argparse.Namespace) -> None:
    choose_blas("auto")  # before MLX comes in
    import mlx.core as mx
    from mlx_lm import load as load_stock
    from mlx_lm.lora import train_model
    from mlx_lm.tuner.datasets import TextDataset

    folder = find_model(options.model)
    model, tokenizer = load_stock(str(folder))[:2]
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
        "save_every": EVERY,
        "adapter_path": str(options.folder),
    }
    return SimpleNamespace(**{**CONFIG_DEFAULTS, **ours})


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    """The report: a row without an adapter, and one for each state that was kept."""
    rows = [{"steps": 0, **_row(options.model, None)}]
    for steps, adapter in _states(options.folder):
        rows.append({"steps": steps, **_row(options.model, adapter)})
    learned = json.loads((options.folder / "adapter_config.json").read_text())
    return {
        "model": options.model,
        "machine": [platform.system(), platform.machine()],
        **{name: version(name) for name in ("mlx", "mlx-lm")},
        "python": platform.python_version(),
        "adapter": {
            name: learned[name] for name in ("fine_tune_type", "lora_parameters", "learning_rate", "batch_size")
        },
        "prompts": PROMPTS,
        "tokens": TOKENS,
        "rows": rows,
    }


def _row(model: str, adapter: Path | None) -> dict[str, Any]:
    llm = load(model, adapter=adapter, settings=load_settings(session_cache_max_bytes=0))
    from selfdraft.tuning.adapter_effect import drafting
    from selfdraft.tuning.subject import loaded

    scores = [score for text in _paragraphs()[1] for score in llm.score(text, raw=True) if score is not None]
    loss = -sum(score.logprob for score in scores) / len(scores)
    row = {"held_out_loss": round(loss, 3), **(drafting(loaded(llm), PROMPTS, TOKENS) or {})}
    print(adapter, row, flush=True)
    return row


def _states(folder: Path) -> Iterator[tuple[int, Path]]:
    """Adapters after so many steps, each in a folder of its own."""
    for weights in sorted(folder.glob("*_adapters.safetensors")):
        with tempfile.TemporaryDirectory() as made:
            shutil.copy(folder / "adapter_config.json", made)
            shutil.copy(weights, Path(made) / "adapters.safetensors")
            yield int(weights.name.partition("_")[0]), Path(made)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("folder", type=Path, help="where the adapter goes, or lies")
    parser.add_argument("--model", default="reference")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--type", choices=("lora", "dora"), default="lora")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
