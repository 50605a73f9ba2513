"""Guards that trunk and head compute what `transformers` computes, for more shapes than the reference model has.

Tiny random checkpoints, as Hugging Face stores them, are made anew from their seeds; what transformers computes from
them in float32 is a fixture (tests/reference/README.md). They are loaded as a user's would be: classified, converted,
checked.
"""

from __future__ import annotations

import json
from itertools import repeat
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from tests.reference.random_checkpoints import VARIANTS, Variant, full_config, make_weights, stored_as
from tests.support.reference import FIXTURES, cosine, largest_difference, run_through

# float32 on both sides; logits reach about 10.
LARGEST = 2e-4


def test_the_fixtures_are_there() -> None:
    assert {file.stem for file in (FIXTURES / "trunk").iterdir()} == {variant.name for variant in VARIANTS}


def write_checkpoint(variant: Variant, folder: Path) -> Path:
    """The checkpoint as Hugging Face stores it."""
    weights = {
        name: mx.array(values).astype(getattr(mx, stored_as(variant, name)))
        for name, values in make_weights(variant).items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(full_config(variant)))
    return folder


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model and the values expected of it."""
    checkpoint = classify(write_checkpoint(request.param, tmp_path_factory.mktemp("trunk")))
    assert (checkpoint.layout, checkpoint.norms, checkpoint.head.norms) == (
        "huggingface",
        "zero-centred",
        "zero-centred",
    )
    assert (checkpoint.head.source, checkpoint.head.reason) == ("embedded", "")
    model = build_model(checkpoint, with_head=True, dtype=mx.float32).model
    return model, mx.load(str(FIXTURES / "trunk" / f"{request.param.name}.safetensors"))


def assert_close(computed: mx.array, expected: mx.array) -> None:
    assert computed.shape == expected.shape
    assert cosine(computed, expected) > 0.9999
    assert largest_difference(computed, expected) < LARGEST


@pytest.mark.parametrize("pieces", [None, 1, 5, 64])
@pytest.mark.parametrize("prompt", ["short", "long"])
def test_trunk(variant: tuple[Any, dict[str, mx.array]], prompt: str, pieces: int | None) -> None:
    model, expected = variant
    tokens: list[int] = expected[f"{prompt}.ids"].tolist()  # type: ignore[assignment]
    sizes = repeat(pieces) if pieces else None
    hidden = run_through(model, tokens, model.new_state(), sizes, keep_steps=pieces in (1, 5))
    kept = expected[f"{prompt}.trunk_hidden"]
    hidden = hidden[-kept.shape[0] :]
    assert_close(hidden, kept)
    assert_close(model.logits(hidden[None])[0], expected[f"{prompt}.trunk_logits"])


def test_head(variant: tuple[Any, dict[str, mx.array]]) -> None:
    model, expected = variant
    tokens: list[int] = expected["long.ids"].tolist()  # type: ignore[assignment]
    drafts: list[int] = expected["long.mtp_drafts"].tolist()  # type: ignore[assignment]
    state = model.new_state()
    hidden = run_through(model, tokens, state, keep_steps=False)[None]

    entries = len(tokens) - 1
    outputs = [model.draft(mx.array([tokens[1:]]), hidden[:, :-1], [state], [0])[:, -1:]]
    for depth, draft in enumerate(drafts[:-1]):
        outputs.append(model.draft(mx.array([[draft]]), outputs[-1], [state], [entries + depth]))
    drafted = mx.concatenate(outputs, axis=1)

    assert_close(drafted[0], expected["long.mtp_hidden"])
    logits = model.logits(drafted)[0]
    assert_close(logits, expected["long.mtp_logits"])
    assert mx.argmax(logits, axis=-1).tolist() == drafts
