"""Guards every family of models: trunk and head against an independent reference, drafting against plain decoding.

Tiny random checkpoints in each family's own Hugging Face layout are made anew from their names; what other code
computes from them in float32 is a fixture (tests/reference/README.md). They are loaded as a user's would be.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from selfdraft.engine import Boundary, Cut, Engine, Request
from selfdraft.errors import CheckpointError, InvalidRequest
from selfdraft.models.base import architecture
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from selfdraft.sessions.payload import cut_moment, cut_span, join
from tests.reference.families import FAMILIES, Family
from tests.support.reference import FIXTURES, cosine, largest_difference, run_through
from tests.support.rows import finish, params, prefill_all, solo
from tests.support.scripted import ScriptedHead

LARGEST = 2e-4  # float32 on both sides; logits reach about 10
TOKENS = 40
CHUNK = 16

# Prompts that end inside the first window of the smallest sliding layers, at its border, and far behind it.
LENGTHS = [1, 2, 3, CHUNK, CHUNK + 1, 70]


def write_checkpoint(family: Family, folder: Path) -> Path:
    """The checkpoint as Hugging Face stores it."""
    weights = {name: mx.array(values) for name, values in family.weights().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(family.config))
    if family.assistant:
        (folder / "assistant").mkdir()
        write_checkpoint(family.assistant, folder / "assistant")
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(family, tmp_path_factory.mktemp(family.name))


@pytest.fixture(scope="module")
def model(family: Family, folder: Path) -> Any:
    checkpoint = classify(folder)
    assert checkpoint.head.source == ("separate" if family.assistant else "embedded")
    assert (checkpoint.head.reason, checkpoint.layout) == ("", "huggingface")
    assert checkpoint.notes == []
    return build_model(checkpoint, with_head=True).model


@pytest.fixture(scope="module")
def expected(family: Family) -> dict[str, mx.array]:
    found = mx.load(str(FIXTURES / "families" / f"{family.name}.safetensors"))
    assert isinstance(found, dict)
    return found


def prompts(family: Family) -> list[list[int]]:
    return [family.prompt(length, seed=length).tolist() for length in LENGTHS]


def request(prompt: list[int], depth: Any, **settings: Any) -> Request:
    return Request(prompt, params(depth=depth, max_tokens=TOKENS, **settings))


def assert_close(computed: mx.array, wanted: mx.array) -> None:
    """But for what is -inf on both sides: tokens that a head leaves out."""
    assert computed.shape == wanted.shape
    assert mx.array_equal(computed == -mx.inf, wanted == -mx.inf).item()
    computed, wanted = (mx.where(x == -mx.inf, 0, x) for x in (computed, wanted))
    assert cosine(computed, wanted) > 0.9999
    assert largest_difference(computed, wanted) < LARGEST


def _model_type(family: Family) -> str:
    return str(family.config.get("text_config", family.config)["model_type"])


def test_every_family_has_a_fixture() -> None:
    assert {file.stem for file in (FIXTURES / "families").iterdir()} == set(FAMILIES)


@pytest.mark.parametrize("pieces", [None, 1, 5, 64])
def test_trunk(model: Any, expected: dict[str, mx.array], pieces: int | None) -> None:
    tokens: list[int] = expected["ids"].tolist()  # type: ignore[assignment]
    sizes = repeat(pieces) if pieces else None
    hidden = run_through(model, tokens, model.new_state(), sizes, keep_steps=pieces in (1, 5))[-8:]
    assert_close(hidden, expected["trunk_hidden"])
    assert_close(model.logits(hidden[None])[0], expected["trunk_logits"])


@pytest.mark.parametrize("pieces", [None, 1, 7])
def test_head(model: Any, expected: dict[str, mx.array], pieces: int | None) -> None:
    """However many true pairs come in at once, drafts behind them are those of the whole history."""
    tokens: list[int] = expected["ids"].tolist()  # type: ignore[assignment]
    drafts: list[int] = expected["mtp_drafts"].tolist()  # type: ignore[assignment]
    state = model.new_state()
    hidden = run_through(model, tokens, state, keep_steps=False)[None]
    last = _prime(model, tokens, hidden, state, repeat(pieces or len(tokens)))
    assert last is not None
    found = _drafts_behind(model, state, last, drafts[:-1])
    assert_close(found, expected["mtp_logits"])
    assert mx.argmax(found, axis=-1).tolist() == drafts


def _prime(model: Any, tokens: list[int], hidden: mx.array, state: Any, pieces: Iterator[int]) -> mx.array | None:
    """Give the head the true pairs it lacks, with drafts in between that come to nothing; its output for the newest."""
    out = None
    while (done := state.head_length) < len(tokens) - 1:
        end = min(done + next(pieces), len(tokens) - 1)
        out = model.draft(mx.array([tokens[done + 1 : end + 1]]), hidden[:, done:end], [state], [done])[:, -1:]
        state.head_length = end
        last = out
        for step in range(1, min(model.max_depth, 3)):
            last = model.draft(mx.array([[step]]), last, [state], [end + step - 1], step)
    return out


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_drafting_equals_plain_decoding(model: Any, family: Family, setting: dict[str, Any]) -> None:
    """At every depth, beside others, with the family's own head and with one that is right seven times in ten."""
    asked = prompts(family)
    texts = [solo(model, request(prompt, 0, **setting), prefill_chunk=CHUNK).emitted for prompt in asked]
    scripted = ScriptedHead(model)
    for kind in (model, scripted):
        engine = Engine(kind, prefill_chunk=CHUNK)
        depths = cycle([*range(1, min(family.max_depth, 4) + 1), "auto"])
        rows = [engine.add(request(prompt, next(depths), **setting)) for prompt in asked]
        if kind is scripted:
            for seed, (row, text) in enumerate(zip(rows, texts, strict=True)):
                scripted.follow(row, text, lambda index, seed=seed: random.Random(1000 * seed + index).random() < 0.7)
        finish(engine)
        assert [row.emitted for row in rows] == texts


def test_the_heads_history_is_that_of_the_whole_text(model: Any, family: Family) -> None:
    """Whatever was drafted and rejected on the way, in a batch of rows of other lengths and depths: what the head says
    next is what it says behind all true pairs at once."""
    scripted = ScriptedHead(model)
    engine = Engine(scripted, prefill_chunk=CHUNK)
    depths = cycle(range(1, min(family.max_depth, 4) + 1))
    for seed, prompt in enumerate(prompts(family)):
        row = engine.add(request(prompt, next(depths), temperature=0.0))
        text = solo(model, request(prompt, 0, temperature=0.0)).emitted
        scripted.follow(row, text, lambda index, seed=seed: random.Random(100 * seed + index).random() < 0.6)
    prefill_all(engine)
    for _ in range(5):
        engine.step()
    assert len(engine.rows) == len(LENGTHS)
    for row in engine.rows:
        assert row.pending is not None
        tokens, count = [*row.request.prompt, *row.emitted], len(row.pending.tokens)
        whole, state = model.new_state(), row.state
        hidden = run_through(model, tokens[:-1], whole, keep_steps=False)[None]
        outputs = [
            model.draft(mx.array([tokens[1:]]), hidden, [whole], [0]),
            model.draft(mx.array([row.pending.tokens]), row.pending.hidden[None, :count], [state], [state.head_length]),
        ]
        assert state.head_length + count == len(tokens) - 1
        whole.head_length = state.head_length = len(tokens) - 1
        found = [_drafts_behind(model, each, out[:, -1:]) for each, out in zip((whole, state), outputs, strict=True)]
        assert_close(found[1], found[0])


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_rollback_is_exact(model: Any, family: Family, accepted: int) -> None:
    """A rejected tail leaves nothing behind: the next logits are those of a state that never saw it, to the bit."""
    for prompt in prompts(family):
        rolled, plain = model.new_state(), model.new_state()
        for state in (rolled, plain):
            run_through(model, prompt, state, keep_steps=False)
        window = family.prompt(4, seed=99).tolist()
        _, captured = model.forward(mx.array([window]), [rolled], keep_steps=True)
        captured.commit([rolled], [accepted + 1])
        for token in window[: accepted + 1]:
            run_through(model, [token], plain, keep_steps=True)
        following, _ = model.forward(mx.array([[5, 6]]), [rolled], keep_steps=True)
        wanted, _ = model.forward(mx.array([[5, 6]]), [plain], keep_steps=True)
        assert mx.array_equal(following, wanted).item()


@pytest.mark.parametrize(
    "lengths",
    [[75], [1], [2], [3, 4], [1, 2, 3, 40, 75], [257, 258]],  # one pair is entry 0; 256 entries fill a buffer
    ids=str,
)
def test_a_stored_state_goes_on_as_it_was(model: Any, family: Family, lengths: list[int]) -> None:
    """Cut into what a session keeps, and joined again: the next drafts and logits are the same bits."""
    prompt = family.prompt(lengths[-1]).tolist()
    state, spans, cuts, done = model.new_state(), [], (), 0
    hidden = mx.zeros((1, 0, family.text["hidden_size"]))
    for length in lengths:
        new = run_through(model, prompt[done:length], state, keep_steps=False)[None]
        hidden = mx.concatenate([hidden, new], axis=1)
        _prime(model, prompt[:length], hidden, state, repeat(20))
        cuts = (*cuts, Cut(length, chunk=True))
        boundary = Boundary(state, hidden[0, -1:], cuts)
        spans.append(cut_span(boundary, done, head=True))
        done = length
    again = join(model.new_state(), spans, cut_moment(boundary, head=True), boundary.cuts, head=True).state
    assert (again.length, again.head_length) == (state.length, state.head_length) == (done, done - 1)
    outputs = [model.draft(mx.array([[5]]), hidden[:, -1:], [each], [each.head_length]) for each in (state, again)]
    state.head_length = again.head_length = done
    found = [_drafts_behind(model, each, out) for each, out in zip((state, again), outputs, strict=True)]
    assert mx.array_equal(*found).item()
    logits = [model.forward(mx.array([[1, 2, 3]]), [each], keep_steps=True)[0] for each in (state, again)]
    assert mx.array_equal(*logits).item()


def _drafts_behind(model: Any, state: Any, last: mx.array, drafts: Sequence[int] | None = None) -> mx.array:
    """Logits [depth, V] of a draft behind the head's newest output, and of those behind these drafts."""
    drafts = range(7, 7 + min(model.max_depth, 3) - 1) if drafts is None else drafts
    logits = [model.draft_logits(last)]
    for step, draft in enumerate(drafts, start=1):
        last = model.draft(mx.array([[draft]]), last, [state], [state.head_length + step - 1], step)
        logits.append(model.draft_logits(last, step))
    return mx.concatenate(logits, axis=1)[0]


def test_fewer_tokens_can_be_drafted(model: Any, family: Family) -> None:
    """At every depth, from the projection that this depth has."""
    prompt, some = family.prompt(20).tolist(), [0, 2, 5, 60]
    state = model.new_state()
    hidden = run_through(model, prompt, state, keep_steps=False)[None]
    last = _prime(model, prompt, hidden, state, repeat(20))
    assert last is not None
    whole = _drafts_behind(model, state, last)
    if not family.drafts_fewer:
        assert model.draft_only(some) == 0
        return
    assert model.draft_only(some) > 0
    few = _drafts_behind(model, state, last)
    assert model.draft_only(None) == 0
    assert mx.isinf(few).sum().item() == few.shape[0] * (family.text["vocab_size"] - len(some))
    assert largest_difference(few[:, mx.array(some)], whole[:, mx.array(some)]) < LARGEST


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [0, "many", 2.5, None])
def test_what_is_wrong_in_a_config_is_named(
    family: Family, folder: Path, tmp_path: Path, name: str, value: Any
) -> None:
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(family.config_with(name, value)))
    with pytest.raises(CheckpointError, match=name):
        build_model(classify(tmp_path), with_head=True)


def test_what_a_prompt_takes_is_estimated(model: Any, family: Family) -> None:
    """More for more tokens and for a longer past, and never less than the logical size of residual and scores."""
    short, long, later = model.working_bytes(8, 8), model.working_bytes(64, 64), model.working_bytes(64, 512)
    assert 0 < short < long < later
    assert long >= 64 * family.text["hidden_size"] * 4 * 2


def test_the_depth_has_a_limit(model: Any, family: Family) -> None:
    assert model.max_depth == family.max_depth
    with pytest.raises(InvalidRequest, match=str(family.max_depth)):
        Engine(model).add(request([1, 2], family.max_depth + 1, temperature=0.0))


def test_a_head_that_lacks_a_tensor_is_named(family: Family, folder: Path, tmp_path: Path) -> None:
    known: Any = architecture(_model_type(family))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    holder, file = family.assistant or family, tmp_path / "assistant" if family.assistant else tmp_path
    names = {
        known.canonical(name, family.config | family.config.get("text_config", {})): name for name in holder.shapes
    }
    found = next(name for name in names if name and re.search("enorm|pre_projection|pre_fc_norm", name))
    weights = dict(mx.load(str(file / "model.safetensors")))  # type: ignore[arg-type]
    del weights[names[found]]
    (file / "model.safetensors").unlink()
    mx.save_safetensors(str(file / "model.safetensors"), weights, {"format": "pt"})
    checkpoint = classify(tmp_path)
    assert found in checkpoint.head.reason
    plain = build_model(checkpoint, with_head=False).model
    assert solo(plain, request([1, 2, 3], 0, temperature=0.0)).emitted


@pytest.mark.parametrize("bits", [4, 8])
def test_an_mlx_build_drafts_as_it_decodes(family: Family, folder: Path, tmp_path: Path, bits: int) -> None:
    """Quantised, stacked and stored under mlx-lm's names, it loads, and greedy text hangs on no depth."""
    made: Any = build_model(classify(folder), with_head=True).model
    group = 32
    fits = lambda _, layer: hasattr(layer, "to_quantized") and layer.weight.shape[-1] % group == 0  # noqa: E731
    nn.quantize(made, group_size=group, bits=bits, class_predicate=fits)
    weights = dict(tree_flatten(made.parameters()))
    assert any(name.endswith(".scales") for name in weights if name.startswith("mtp."))
    parts = {tmp_path: (family, weights)}
    if family.assistant:
        head = {name.removeprefix("mtp."): weights.pop(name) for name in list(weights) if name.startswith("mtp.")}
        parts[tmp_path / "assistant"] = (family.assistant, head)
    for place, (part, tensors) in parts.items():
        place.mkdir(exist_ok=True)
        mx.save_safetensors(str(place / "model.safetensors"), tensors, {"format": "mlx"})
        config = {**part.config, "quantization": {"group_size": group, "bits": bits}}
        (place / "config.json").write_text(json.dumps(config))
    checkpoint = classify(tmp_path)
    assert (checkpoint.head.reason, checkpoint.layout, checkpoint.notes) == ("", "mlx", [])
    model: Any = build_model(checkpoint, with_head=True).model
    stored = dict(tree_flatten(made.parameters()))
    loaded = dict(tree_flatten(model.parameters()))
    assert loaded.keys() == stored.keys()
    assert all(mx.array_equal(tensor, stored[name]).item() for name, tensor in loaded.items())
    prompt = prompts(family)[-1]
    depths = (0, min(family.max_depth, 2))
    plain, drafted = (solo(model, request(prompt, depth, temperature=0.0), prefill_chunk=CHUNK) for depth in depths)
    assert drafted.emitted == plain.emitted
