"""Guards Nemotron-H: what its configuration may say, and greedy text at both depths in bf16.

MLX multiplies experts on a CPU in float32 alone, so the model in bf16 has none.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.engine import Request
from selfdraft.errors import CheckpointError
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from selfdraft.models.nemotron_h import build
from tests.reference.families import FAMILIES
from tests.reference.families.nemotron_h import PATTERN, family
from tests.support.families import changed
from tests.support.rows import params, solo

FAMILY = FAMILIES["nemotron_h"]


def test_greedy_text_is_the_same_with_and_without_drafts_in_bf16(tmp_path: Path) -> None:
    dense = family(
        "dense",
        {**PATTERN, "num_hidden_layers": 4, "hybrid_override_pattern": "M*-M", "mtp_hybrid_override_pattern": "*-"},
    )
    model = build_model(classify(changed(tmp_path, dense)), with_head=True, dtype=mx.bfloat16).model
    prompt = FAMILY.prompt(60).tolist()
    texts = [solo(model, Request(prompt, params(depth=d, max_tokens=60, temperature=0.0))).emitted for d in (0, 1)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("limit", [[0.01, 0.1], [0.01, {"__float__": "Infinity"}], None])
def test_the_limit_of_time_steps_is_kept(limit: Any) -> None:
    config = {name: value for name, value in FAMILY.config.items() if name != "time_step_limit"}
    model = build({**config, "time_step_limit": limit} if limit else config, False)
    low, high = model.model.layers[0].mixer.time_step_limit
    assert (low, high) == (0.01 if limit else 0.0, 0.1 if limit and limit[1] == 0.1 else math.inf)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("ssm_state_size", "16"),
        ("n_routed_experts", None),
        ("moe_latent_size", "16"),
        ("layers_block_type", ["mamba", "lstm"]),
        ("layers_block_type", []),
        ("hybrid_override_pattern", "MX"),
        ("hybrid_override_pattern", 5),
        ("mtp_layers_block_type", ["mamba", "moe"]),
        ("time_step_limit", [0.1]),
        ("time_step_limit", "none"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=field):
        build_model(classify(changed(tmp_path, FAMILY, **{field: value})), with_head=True)
