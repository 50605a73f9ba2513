"""Guards ERNIE-4.5: released and converted weights that differ from the rule, and what its configuration may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from tests.reference.families import FAMILIES
from tests.support.families import changed, stored

FAMILY = FAMILIES["ernie4_5_moe"]
BIAS = "e_score_correction_bias"


def logits(folder: Path) -> mx.array:
    model = build_model(classify(folder), with_head=True).model
    row = model.new_state()
    hidden, _ = model.forward(mx.array([[5, 6, 7, 8]]), [row], keep_steps=False)
    drafted = model.draft(mx.array([[6, 7, 8]]), hidden[:, :-1], [row], [0])
    return mx.concatenate([model.logits(hidden), model.draft_logits(drafted)], axis=1)


def test_a_projection_that_was_released_transposed_is_turned(tmp_path: Path) -> None:
    wanted = logits(changed(tmp_path, FAMILY))
    name = "model.mtp_linear_proj.0.weight"
    weights = stored(tmp_path)
    turned = mx.contiguous(weights[name].T)
    assert mx.array_equal(logits(changed(tmp_path, FAMILY, {**weights, name: turned})), wanted).item()


def test_a_conversion_without_biases_says_so(tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in stored(changed(tmp_path, FAMILY)).items() if BIAS not in name}
    assert logits(changed(tmp_path, FAMILY, weights)).size
    (note,) = classify(tmp_path).notes
    assert "2 layers lack the bias" in note
    assert BIAS in note
    assert classify(changed(tmp_path, FAMILY, weights, moe_use_aux_free=False)).notes == []


def test_the_last_layer_with_experts_may_be_given_from_the_end(tmp_path: Path) -> None:
    wanted = logits(changed(tmp_path, FAMILY))
    assert mx.array_equal(logits(changed(tmp_path, FAMILY, moe_layer_end_index=-1)), wanted).item()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("hidden_size", "32"),
        ("moe_num_experts", None),
        ("moe_k", True),
        ("moe_layer_interval", 0),
        ("moe_layer_start_index", [1, 1]),
        ("moe_layer_end_index", -2),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=field):
        build_model(classify(changed(tmp_path, FAMILY, **{field: value})), with_head=True)
