"""Guards what a recipe comes to for a checkpoint: bits by path, what stays dense, and what is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.errors import CheckpointError, InvalidRequest
from selfdraft.forge import plan as planning
from selfdraft.forge.plan import HEAD_FILE, OTHER_FILE, Plan, plan
from selfdraft.forge.recipe import NAMED, Recipe
from selfdraft.models.checkpoint import classify
from selfdraft.source import REFERENCE, find_model
from tests.reference.families import FAMILIES
from tests.support.checkpoints import save, tensors_of
from tests.support.nano import NANO_CONFIG, nano_model


def planned(folder: Path, recipe: Recipe) -> Plan:
    return plan(classify(folder), recipe)


def bits(wanted: Plan) -> dict[str, int]:
    return {path: form["bits"] for path, form in wanted.formats.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {name: tensor.astype(mx.bfloat16) for name, tensor in tensors_of(nano_model(seed=1)).items()}
    return save(tmp_path_factory.mktemp("nano"), tensors)


def test_recipes_by_name(folder: Path) -> None:
    four = bits(planned(folder, Recipe.named("4bit")))
    assert {path for path, few in four.items() if few == 8} == {"model.embed_tokens", "lm_head"}
    assert four["model.layers.0.mlp.down_proj"] == 4
    eight = bits(planned(folder, Recipe.named("8bit")))
    assert four.keys() == eight.keys()
    assert set(eight.values()) == {8}
    mixed = bits(planned(folder, Recipe.named("mixed")))
    assert set(mixed.values()) == {4, 6, 8}
    assert mixed["model.layers.1.self_attn.v_proj"] == mixed["model.layers.0.mlp.down_proj"] == 6
    assert bits(planned(folder, Recipe.named("dense"))) == {}
    sizes = [planned(folder, Recipe.named(name)).nbytes for name in ("4bit", "mixed", "8bit", "dense")]
    assert sizes == sorted(set(sizes))


def test_a_named_recipe_s_own_rules_never_take_bits_away(folder: Path) -> None:
    assert bits(planned(folder, Recipe.named("mixed", bits=16))) == {}
    assert set(bits(planned(folder, Recipe.named("mixed", bits=8))).values()) == {8}
    three = bits(planned(folder, Recipe.named("4bit", bits=3)))
    assert set(three.values()) == {3, 8}


def test_the_last_rule_that_fits_decides(folder: Path) -> None:
    rules = Recipe.parse_rules(["*.mlp.*=8", "model.layers.0.*=3", "lm_head=16", "*.layers.0.mlp.up_proj=5"])
    found = bits(planned(folder, Recipe.named("4bit", rules=rules)))
    assert found["model.layers.2.mlp.up_proj"] == 8
    assert found["model.layers.0.mlp.down_proj"] == 3
    assert found["model.layers.0.mlp.up_proj"] == 5
    assert found["model.layers.1.self_attn.q_proj"] == 4
    assert found["model.embed_tokens"] == 8
    assert "lm_head" not in found


@pytest.mark.parametrize("rule", ["model.layers.9.*=8", "q_proj=8", "mtp.fc=8", "*.mlp.gate=8", "model.norm=4"])
def test_a_rule_that_fits_nothing_is_refused(folder: Path, rule: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        planned(folder, Recipe(rules=Recipe.parse_rules([rule])))
    assert f"the rule {rule} fits no layer" in str(caught.value)
    assert "'lm_head'" in str(caught.value)


@pytest.mark.parametrize("rule", ["lm_head", "lm_head=", "=8", "lm head=8", "lm_head=8bits", "lm_head=-4", ""])
def test_a_text_that_is_no_rule(rule: str) -> None:
    with pytest.raises(InvalidRequest, match="PATTERN=BITS") as caught:
        Recipe.parse_rules([rule])
    assert caught.value.param == "set"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bits": 2}, "bits"),
        ({"bits": 7}, "bits"),
        ({"bits": 0}, "bits"),
        ({"bits": 32}, "bits"),
        ({"rules": (("lm_head", 7),)}, "set"),
        ({"group_size": 16}, "group"),
        ({"group_size": 0}, "group"),
        ({"group_size": 256}, "group"),
        ({"draft_vocabulary": 255}, "draft_vocabulary"),
        ({"draft_vocabulary": -1}, "draft_vocabulary"),
    ],
)
def test_numbers_that_are_not_possible(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match="not possible") as caught:
        Recipe(**fields)
    assert caught.value.param == param


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="'2bit'; there is 4bit, 8bit, mixed, dense"):
        Recipe.named("2bit")
    assert Recipe.named("4bit", draft_vocabulary=256).draft_vocabulary == 256


@pytest.mark.parametrize("name", FAMILIES)
def test_routers_and_what_a_group_does_not_divide_stay_dense(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"),
        {name: mx.array(values) for name, values in family.weights().items()},
        {"format": "pt"},
    )
    (tmp_path / "config.json").write_text(json.dumps(family.config))
    checkpoint = classify(tmp_path)
    wanted = plan(checkpoint, Recipe(group_size=32))
    assert wanted.formats
    for path in wanted.formats:
        assert checkpoint.tensors[f"{path}.weight"].shape[-1] % 32 == 0
        assert not path.endswith(("mlp.gate", "mlp.gate.gate", "shared_expert_gate")), path
        assert not path.startswith("mtp."), path
    dense = {entry.name for shard in wanted.shards for entry in shard.entries if entry.dtype == "BF16"}
    routers = {name for name in checkpoint.tensors if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))}
    assert routers <= dense


def test_files_are_filled_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_SHARD_BYTES", 10_000)
    wanted = planned(folder, Recipe.named("4bit"))
    names = [shard.name for shard in wanted.trunk]
    count = len(names)
    assert count > 3
    assert names == [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    assert all(shard.nbytes <= 10_000 or len(shard.parts) == 1 for shard in wanted.trunk)
    assert wanted.head is not None
    assert wanted.head.name == HEAD_FILE
    assert {part.name.startswith("mtp.") for part in wanted.head.parts} == {True}
    written = [part.name for shard in wanted.shards for part in shard.parts]
    assert sorted(written) == sorted(classify(folder).tensors)


@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [
        (mx.bfloat16, "auto", "BF16"),
        (mx.float16, "auto", "F16"),
        (mx.float32, "auto", "BF16"),
        (mx.bfloat16, "float16", "F16"),
        (mx.float16, "bfloat16", "BF16"),
    ],
)
def test_the_dtype_is_the_source_s_unless_it_is_asked_for(
    tmp_path: Path, stored: mx.Dtype, asked: Any, found: str
) -> None:
    save(tmp_path, {name: tensor.astype(stored) for name, tensor in tensors_of(nano_model(seed=1)).items()})
    wanted = planned(tmp_path, Recipe.named("4bit", dtype=asked))
    dtypes = {entry.name: entry.dtype for shard in wanted.shards for entry in shard.entries}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("A_log")} == {found, "U32"}
    assert dtypes["model.layers.0.linear_attn.A_log"] == "F32"
    assert wanted.recipe.dtype == {"F16": "float16", "BF16": "bfloat16"}[found]


def test_what_is_stored_quantised_stays(tmp_path: Path) -> None:
    model = nano_model(seed=1, bits=8)
    save(tmp_path, tensors_of(model), {**NANO_CONFIG, "quantization": {"bits": 8, "group_size": 32}})
    wanted = planned(tmp_path, Recipe.named("4bit"))
    assert {(form["bits"], form["group_size"]) for form in wanted.formats.values()} == {(8, 32)}
    with pytest.raises(CheckpointError, match="stored quantised, and stay as they are"):
        planned(tmp_path, Recipe(rules=(("lm_head", 4),)))


def test_a_tensor_of_another_modality_that_is_stored_twice(tmp_path: Path) -> None:
    save(tmp_path, {**tensors_of(nano_model()), "model.visual.a.weight": mx.ones(4)}, shards=2)
    for number in (1, 2):
        path = str(tmp_path / f"model-0000{number}-of-00002.safetensors")
        stored: Any = mx.load(path)
        mx.eval(stored)
        mx.save_safetensors(path, {**stored, "model.visual.a.weight": mx.ones(4)})
    with pytest.raises(CheckpointError, match=r"'model\.visual\.a\.weight' is stored twice"):
        planned(tmp_path, Recipe())
    assert OTHER_FILE not in {path.name for path in tmp_path.iterdir()}


def test_all_recipes_fit_the_reference_model() -> None:
    for name in NAMED:
        wanted = planned(find_model(REFERENCE), Recipe.named(name))
        assert wanted.head is not None
        assert wanted.largest == 8192 * 384 * 2
