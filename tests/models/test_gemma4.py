"""Guards Gemma 4's assistant: where it is found, which ones are refused, and what it reads of the trunk's keys.

It keeps nothing of its own: a draft hangs on the trunk's keys before its pair, and on nothing behind them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.errors import CheckpointError
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from selfdraft.models.probe import probe_acceptance
from selfdraft.opening import _with_head_if_sound
from selfdraft.state import GROWTH
from tests.models.test_families import write_checkpoint
from tests.reference.families import FAMILIES, Family
from tests.support.families import changed
from tests.support.reference import largest_difference, run_through

SMALL, EXPERTS = FAMILIES["gemma4"], FAMILIES["gemma4_experts"]


@pytest.fixture(scope="module", params=[SMALL, EXPERTS], ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_model(classify(write_checkpoint(family, tmp_path_factory.mktemp("model"))), with_head=True).model


def beside(folder: Path, family: Family, place: Path, **config: Any) -> Path:
    """A trunk in `folder`, and its assistant in another place."""
    assert family.assistant
    for part in (folder, place):
        part.mkdir(parents=True, exist_ok=True)
    changed(place, replace(family.assistant, config={**family.assistant.config, **config}))
    return changed(folder, family)


def drafts(model: Any, row: Any, tokens: list[int], hidden: mx.array, offset: int) -> mx.array:
    out = model.draft(mx.array([tokens]), hidden[None], [row], [offset])
    logits: mx.array = model.draft_logits(out, whole=True)[0]
    return logits


def test_pairs_at_once_are_drafted_from_as_one_by_one(model: Any, family: Family) -> None:
    """Each sees the keys before its own position, also past the window, and none behind."""
    prompt, row = family.prompt(30).tolist(), model.new_state()
    hidden = run_through(model, prompt, row, keep_steps=False)
    wide = drafts(model, row, prompt[1:], hidden[:-1], 0)
    singles = [drafts(model, row, [prompt[i + 1]], hidden[i : i + 1], i) for i in range(len(prompt) - 1)]
    assert largest_difference(wide, mx.concatenate(singles)) < 1e-4


def test_padding_behind_the_true_pairs_changes_nothing(model: Any, family: Family) -> None:
    """Also where it stands past all keys that are held, and beside a row with more pairs."""
    rows, hiddens, wanted = [], [], []
    for length in (GROWTH - 1, 20):
        prompt, row = family.prompt(length).tolist(), model.new_state()
        hidden = run_through(model, prompt, row, keep_steps=False)
        wanted.append(drafts(model, row, prompt[-1:], hidden[-2:-1], length - 2))
        rows.append((row, prompt[-1], length - 2))
        hiddens.append(mx.concatenate([hidden[-2:-1], mx.zeros((7, hidden.shape[1]))]))
    tokens = mx.array([[token, *[0] * 7] for _, token, _ in rows])
    states, offsets = [row for row, _, _ in rows], [offset for _, _, offset in rows]
    out = model.draft_logits(model.draft(tokens, mx.stack(hiddens), states, offsets), whole=True)
    for found, single in zip(out, wanted, strict=True):
        assert largest_difference(found[:1], single) < 1e-4


def test_keys_that_were_let_go_of_are_not_missed(model: Any, family: Family) -> None:
    """Behind a long prompt in chunks, sliding layers hold its end alone: drafts are those of one that holds all."""
    prompt = family.prompt(3 * GROWTH).tolist()
    found = []
    for pieces in (None, repeat(50)):
        row = model.new_state()
        hidden = run_through(model, prompt, row, pieces, keep_steps=False)
        assert (max(layer.first for layer in row.attention) > 0) == (pieces is not None)
        found.append(drafts(model, row, prompt[-4:], hidden[-5:-1], len(prompt) - 5))
    assert largest_difference(*found) < 1e-3


def test_the_probe_counts_what_the_assistant_drafts(model: Any, family: Family) -> None:
    prompt, row = family.prompt(40).tolist(), model.new_state()
    hidden = run_through(model, prompt, row, keep_steps=False)
    chosen = mx.argmax(model.logits(hidden), axis=-1).tolist()
    agreed = [
        mx.argmax(drafts(model, row, [prompt[i + 1]], hidden[i : i + 1], i)).item() == chosen[i + 1]
        for i in range(len(prompt) - 1)
    ]
    assert probe_acceptance(model, prompt) == sum(agreed) / len(agreed)


def test_only_chosen_clusters_are_scored_unless_all_are_asked_for(tmp_path: Path) -> None:
    model = build_model(classify(write_checkpoint(SMALL, tmp_path)), with_head=True).model
    assert SMALL.assistant
    hidden = mx.random.normal((1, 1, 16), key=mx.random.key(1))
    some, whole = model.draft_logits(hidden), model.draft_logits(hidden, whole=True)
    scored = some != -mx.inf
    config = SMALL.assistant.config
    clusters = config["text_config"]["vocab_size"] // config["num_centroids"]
    assert scored.sum().item() == config["centroid_intermediate_top_k"] * clusters
    assert mx.isfinite(whole).all().item()
    assert largest_difference(mx.where(scored, some, 0), mx.where(scored, whole, 0)) < 1e-5


@pytest.mark.parametrize(
    ("model_folder", "assistant"),
    [
        ("model", "model/assistant"),
        ("gemma-4-E2B-it", "gemma-4-E2B-it-assistant"),
        ("models--google--gemma-4/snapshots/abc", "models--google--gemma-4-assistant/snapshots/def"),
    ],
)
def test_it_is_found_where_people_put_it(tmp_path: Path, model_folder: str, assistant: str) -> None:
    folder = beside(tmp_path / model_folder, SMALL, tmp_path / assistant)
    if "snapshots" in assistant:
        refs = (tmp_path / assistant).parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text("def")
    head = classify(folder).head
    assert (head.source, head.reason) == ("separate", "")


def test_without_one_it_is_said_where_it_belongs(tmp_path: Path) -> None:
    head = classify(changed(tmp_path, SMALL)).head
    assert head.source == "none"
    assert "checkpoint of its own" in head.reason
    assert "NAME-assistant" in head.reason


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"backbone_hidden_size": 48}, "another model: its backbone_hidden_size is 48"),
        ({"text_config": None}, "no text_config"),
        ({"num_centroids": 7}, "num_centroids 7"),
        ({"text": {"head_dim": 8}}, "another model: its head size of sliding_attention is 8"),
        ({"text": {"layer_types": ["full_attention"] * 3}}, "layer_types"),
        ({"text": {"num_hidden_layers": 0}}, "num_hidden_layers"),
        ({"text": {"vocab_size": 48}}, "another model: its vocab_size is 48"),
        ({"text": {"intermediate_size": 64}}, "mlp.down_proj"),
    ],
)
def test_one_of_another_model_is_refused_with_the_reason(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    assert SMALL.assistant
    if "text" in config:
        config = {"text_config": SMALL.assistant.config["text_config"] | config["text"]}
    checkpoint = classify(beside(tmp_path, SMALL, tmp_path / "assistant", **config))
    assert reason in checkpoint.head.reason
    assert build_model(checkpoint, with_head=False).model.max_depth == 0


def test_one_that_fits_and_drafts_nothing_right_is_refused(tmp_path: Path) -> None:
    """Shapes prove no match: of random weights the probe finds that they do not belong together."""
    tokenizer: Any = SimpleNamespace(encode=lambda *_, **__: EXPERTS.prompt(80).tolist())
    loaded, reason = _with_head_if_sound(classify(write_checkpoint(EXPERTS, tmp_path)), tokenizer, None, None, None)
    assert loaded.model.max_depth == 0
    assert "drafts" in reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("num_hidden_layers", "6"),
        ("layer_types", ["sliding_attention"]),
        ("num_kv_shared_layers", 6),
        ("num_kv_shared_layers", 8),
        ("num_kv_shared_layers", 4),
        ("sliding_window", None),
        ("num_experts", None),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    text = SMALL.config["text_config"] | {"enable_moe_block": field == "num_experts", field: value}
    with pytest.raises(CheckpointError, match=field):
        build_model(classify(changed(tmp_path, SMALL, text_config=text)), with_head=False)


def test_a_config_is_read_as_saved_without_defaults(tmp_path: Path) -> None:
    """What the family's configuration class fills in is not what mlx-lm's does."""
    text = {name: value for name, value in EXPERTS.config.items() if name not in ("final_logit_softcapping",)}
    (tmp_path / "config.json").write_text(json.dumps(text))
    weights = {name: mx.array(values) for name, values in EXPERTS.weights().items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "pt"})
    model: Any = build_model(classify(tmp_path), with_head=False).model
    hidden = mx.ones((1, 1, 32)) * 50
    assert mx.array_equal(model.logits(hidden), model.output_layer().as_linear(hidden)).item()
