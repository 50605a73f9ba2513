"""Guards that pictures become what `transformers` makes of them: patches, embeddings, positions, logits, drafts.

Two tiny random checkpoints, dense and of experts, and a prompt with two pictures of different sizes between text; what
transformers computes from them in float32 is a fixture (tests/reference/README.md).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from selfdraft.images import Picture
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from selfdraft.vision import PicturePrompts, Tower, inspect_tower, load_tower
from selfdraft.vision.patches import Patching
from tests.reference.vision_checkpoints import CHECKPOINTS, IMAGE, SIZES, picture
from tests.support.reference import FIXTURES, cosine, largest_difference
from tests.support.vision import write_reference

# float32 on both sides; logits reach about 10.
LARGEST = 2e-4
EVERY = 5

Fixture = dict[str, mx.array]


@pytest.fixture(scope="module", params=CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tower, Fixture]:
    """A model, its tower, and the values expected of them."""
    checkpoint = classify(write_reference(request.param, tmp_path_factory.mktemp("vision")))
    assert inspect_tower(checkpoint).reason == ""
    assert not any("modalities" in note for note in checkpoint.notes)
    expected = mx.load(str(FIXTURES / "vision" / f"{request.param.name}.safetensors"))
    assert isinstance(expected, dict)
    model = build_model(checkpoint, with_head=True, dtype=mx.float32).model
    return model, load_tower(checkpoint, mx.float32), expected


def pictures() -> list[Picture]:
    return [Picture.of(picture(*size)) for size in SIZES]


def assert_close(computed: mx.array, expected: mx.array) -> None:
    assert computed.shape == expected.shape
    assert cosine(computed, expected) > 0.9999
    assert largest_difference(computed, expected) < LARGEST


def test_patches(loaded: tuple[Any, Tower, Fixture], tmp_path: Path) -> None:
    expected = loaded[2]
    patching = Patching.from_folder(write_reference(CHECKPOINTS[0], tmp_path))
    for number, (each, size) in enumerate(zip(pictures(), SIZES, strict=True)):
        grid = patching.grid(*size)
        assert [grid.height, grid.width] == expected["grids"][number].tolist()
        assert np.abs(patching.patches(each.rgb, grid) - np.array(expected[f"patches.{number}"])).max() < 1e-6


def test_embeddings(loaded: tuple[Any, Tower, Fixture]) -> None:
    _, tower, expected = loaded
    for number, each in enumerate(pictures()):
        assert_close(tower.encode(each, tower.grid(each)), expected[f"features.{number}"])


def test_positions(loaded: tuple[Any, Tower, Fixture]) -> None:
    _, tower, expected = loaded
    tokens: list[int] = expected["ids"].tolist()  # type: ignore[assignment]
    places = PicturePrompts(tower, "<image>", IMAGE, 97).inputs(tokens, pictures()).places
    assert places.positions(0, len(tokens)).tolist() == expected["positions"].tolist()
    for start in range(len(tokens)):
        assert places.positions(start, start + 3)[:, 0].tolist() == expected["positions"][:, start].tolist()
        if tokens[start] != IMAGE:
            assert [start + places.rope_delta(start)] * 3 == expected["positions"][:, start].tolist()
    assert [places.rope_delta(len(tokens))] == expected["rope_delta"].tolist()


@pytest.mark.parametrize(
    "cuts", [(), (12,), (7, 19, 20), tuple(range(1, 55))], ids=["whole", "inside", "borders", "single"]
)
def test_logits_and_drafts(loaded: tuple[Any, Tower, Fixture], cuts: tuple[int, ...]) -> None:
    """Of a prompt in one piece, and cut inside of pictures and at their borders: cuts change no more than low bits."""
    model, tower, expected = loaded
    tokens: list[int] = expected["ids"].tolist()  # type: ignore[assignment]
    inputs = PicturePrompts(tower, "<image>", IMAGE, 97).inputs(tokens, pictures())
    state, hidden = model.new_state(), []
    borders = [0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    for start, end in pairwise(borders):
        while inputs.prepare(start, end):
            pass
        state.rope_delta = inputs.rope_delta(start)
        ids = mx.array([tokens[start:end]])
        out, captured = model.forward(ids, [state], keep_steps=False, **inputs.trunk(start, end))
        captured.commit([state], [end - start])
        hidden.append(out)
    whole = mx.concatenate(hidden, axis=1)
    kept = sorted({*range(0, len(tokens), EVERY), len(tokens) - 1})
    assert_close(model.logits(whole)[0][mx.array(kept)], expected["trunk_logits"])

    drafts: list[int] = expected["mtp_drafts"].tolist()  # type: ignore[assignment]
    for start, end in zip([1, *borders[1:-1]], borders[1:], strict=True):
        state.rope_delta = inputs.rope_delta(start)
        ids, pairs = mx.array([tokens[start:end]]), whole[:, start - 1 : end - 1]
        if start < end:
            out = model.draft(ids, pairs, [state], [start - 1], **inputs.head(start, end))
    state.rope_delta = inputs.rope_delta(len(tokens))
    outputs = [out[:, -1:]]
    for depth, draft in enumerate(drafts[:-1]):
        outputs.append(model.draft(mx.array([[draft]]), outputs[-1], [state], [len(tokens) - 1 + depth]))
    logits = model.logits(mx.concatenate(outputs, axis=1))[0]
    assert_close(logits, expected["mtp_logits"])
    assert mx.argmax(logits, axis=-1).tolist() == drafts
