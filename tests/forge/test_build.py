"""Guards that a package holds what its recipe says, to the bit, and runs here and in stock mlx-lm.

What is no part of the text model is kept as it is; a source that cannot become a package leaves nothing; memory is
bounded by the largest tensor.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from selfdraft.errors import CheckpointError, SelfdraftError
from selfdraft.forge import room as rooms
from selfdraft.forge.build import build
from selfdraft.forge.plan import HEAD_FILE, OTHER_FILE
from selfdraft.forge.recipe import NAMED, Recipe
from selfdraft.models.checkpoint import classify
from selfdraft.models.loader import build_model
from selfdraft.models.tensor_header import entries
from selfdraft.source import REFERENCE, find_model
from selfdraft.stamp import read_stamp
from tests.reference.families import FAMILIES
from tests.reference.random_checkpoints import VARIANTS
from tests.support.checkpoints import (
    Tensors,
    add_text_side,
    load_folder,
    renamed,
    same_outputs,
    save,
    snap_norms,
    tensors_of,
    zero_centred,
)
from tests.support.forge import DENSE_HEAD, listing, random_checkpoint, stored_bits, write_family
from tests.support.nano import NANO_CONFIG, nano_model

RANDOM = {variant.name: variant for variant in VARIANTS}


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    model = nano_model(seed=5)
    snap_norms(model)
    return tensors_of(model)


def quantised_in_memory(folder: Path, recipe: Recipe) -> Any:
    """The source in the recipe's dtype, quantised by MLX layer by layer."""
    model = load_folder(folder, dtype=getattr(mx, recipe.settled(classify(folder).stored_dtype).dtype)).model

    def choose(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if path.startswith("mtp.") or not hasattr(layer, "to_quantized") or recipe.bits_of(path) == 16:
            return False
        if layer.weight.shape[-1] % recipe.group_size:
            return False
        return {"group_size": recipe.group_size, "bits": recipe.bits_of(path)}

    nn.quantize(model, class_predicate=choose)
    return model


# What a package holds


@pytest.mark.parametrize("recipe", NAMED)
def test_a_package_is_the_source_quantised_in_memory(tmp_path: Path, recipe: str) -> None:
    source, wanted = find_model(REFERENCE), Recipe.named(recipe, **DENSE_HEAD)
    built = build(source, tmp_path / "package", wanted)
    assert (built.folder, built.head, built.notes) == (tmp_path / "package", None, ())
    made, kept = load_folder(built.folder).model, quantised_in_memory(source, wanted)
    found, expected = tensors_of(made), tensors_of(kept)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert mx.array_equal(tensor, expected[name]).item(), name
    assert same_outputs(made, kept)


def test_the_files_of_a_package(tmp_path: Path) -> None:
    source, target = find_model(REFERENCE), tmp_path / "package"
    built = build(source, target, Recipe.named("4bit", **DENSE_HEAD))
    names = {path.name for path in target.iterdir()}
    assert names == {path.name for path in source.iterdir()} - {"model.safetensors"} | {
        *("model-00001-of-00001.safetensors", HEAD_FILE, "model.safetensors.index.json", "selfdraft.json")
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert {path.stat().st_mode & 0o777 for path in target.iterdir()} == {0o644}
    assert target.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["package"]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    listed = {entry.name: path.name for path in target.glob("*.safetensors") for entry in entries(path)}
    assert index["weight_map"] == listed
    assert index["metadata"]["total_size"] == sum(
        entry.nbytes for path in target.glob("*.safetensors") for entry in entries(path)
    )
    assert built.nbytes == sum(path.stat().st_size for path in target.glob("*.safetensors"))
    config, before = (json.loads((folder / "config.json").read_text()) for folder in (target, source))
    eight = {"group_size": 64, "bits": 8, "mode": "affine"}
    assert config.pop("quantization") == {
        **{"group_size": 64, "bits": 4, "mode": "affine"},
        **{"model.embed_tokens": eight, "language_model.model.embed_tokens": eight},
    }
    assert config == before
    stamp = read_stamp(target)
    assert stamp is not None
    assert (stamp.verdict, stamp.source, stamp.recipe["bits"]) == ("", REFERENCE, 4)


@pytest.mark.parametrize("name", RANDOM)
def test_random_checkpoints(tmp_path: Path, name: str) -> None:
    """Flat and nested, with biases and tied embeddings, with sizes that no group divides."""
    source = random_checkpoint(RANDOM[name], tmp_path / "source")
    recipe = Recipe.named("4bit", group_size=32, **DENSE_HEAD)
    build(source, tmp_path / "package", recipe)
    made = load_folder(tmp_path / "package").model
    assert classify(tmp_path / "package").head.norms == "one-plus"
    assert same_outputs(made, quantised_in_memory(source, recipe))


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    source = write_family(FAMILIES[name], tmp_path / "source")
    recipe = Recipe(bits=8, group_size=32, **DENSE_HEAD)
    build(source, tmp_path / "package", recipe)
    made = classify(tmp_path / "package")
    assert (made.layout, made.head.reason) == ("mlx", "")
    found, expected = (load_folder(folder, dtype=mx.bfloat16).model for folder in (tmp_path / "package", source))
    weights, dense = tensors_of(found), tensors_of(expected)
    for path, layer in expected.named_modules():
        if hasattr(layer, "to_quantized") and f"{path}.scales" in weights:
            codes = mx.quantize(dense.pop(f"{path}.weight"), group_size=32, bits=8)
            dense |= dict(zip((f"{path}.weight", f"{path}.scales", f"{path}.biases"), codes, strict=True))
    assert weights.keys() == dense.keys()
    assert [name for name, tensor in weights.items() if not mx.array_equal(tensor, dense[name]).item()] == []
    assert any(name.endswith("scales") for name in weights)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("shards", [1, 4])
def test_dtypes_and_shards(tmp_path: Path, tensors: Tensors, dtype: mx.Dtype, shards: int) -> None:
    stored = zero_centred({name: tensor.astype(dtype) for name, tensor in tensors.items()})
    source = save(tmp_path / "source", stored, {**NANO_CONFIG, "dtype": "float32"}, shards=shards)
    recipe = Recipe(bits=4, group_size=32, **DENSE_HEAD)
    build(source, tmp_path / "package", recipe)
    loaded = load_folder(tmp_path / "package")
    assert loaded.dtype == (mx.float16 if dtype == mx.float16 else mx.bfloat16)
    assert same_outputs(loaded.model, quantised_in_memory(source, recipe))
    config = json.loads((tmp_path / "package" / "config.json").read_text())
    assert config["dtype"] == ("float16" if dtype == mx.float16 else "bfloat16")


@pytest.mark.parametrize("shards", [1, 3])
def test_other_modalities_are_kept_bit_for_bit(tmp_path: Path, shards: int) -> None:
    source = random_checkpoint(RANDOM["multimodal"], tmp_path / "source", shards=shards)
    built = build(source, tmp_path / "package", Recipe.named("4bit", dtype="float16", **DENSE_HEAD))
    before = {name: raw for name, raw in stored_bits(source).items() if "visual" in name}
    assert len(before) == 4
    assert {raw[0] for raw in before.values()} == {"BF16"}
    after = stored_bits(tmp_path / "package")
    assert {name: after[name] for name in before} == before
    assert {entry.name for entry in entries(built.folder / OTHER_FILE)} == before.keys()
    assert built.notes == ("4 tensors of other modalities are kept bit for bit",)
    config = json.loads((built.folder / "config.json").read_text())
    assert config["vision_config"] == json.loads((source / "config.json").read_text())["vision_config"]
    assert config["text_config"]["dtype"] == "float16"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asked", ["4bit", "dense"])
def test_an_mlx_build_is_kept_as_it_is(tmp_path: Path, bits: int, asked: str) -> None:
    model = nano_model(seed=6, bits=bits, dtype=mx.bfloat16)
    settings = {"bits": bits, "group_size": 32}
    stored = renamed(tensors_of(model), lambda name: f"language_model.{name}")
    source = save(tmp_path / "source", stored, {**NANO_CONFIG, "quantization": settings})
    build(source, tmp_path / "package", Recipe.named(asked, **DENSE_HEAD))
    found = stored_bits(tmp_path / "package")
    before = {name.removeprefix("language_model."): raw for name, raw in stored_bits(source).items()}
    assert found == before
    config = json.loads((tmp_path / "package" / "config.json").read_text())
    assert config["quantization"] == {**settings, "mode": "affine"}


def test_an_mlx_build_of_another_mode_says_so_of_what_is_added(tmp_path: Path) -> None:
    model = nano_model(seed=6, dtype=mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4", class_predicate=lambda path, _: path.endswith("_proj"))
    source = save(tmp_path / "source", tensors_of(model), {**NANO_CONFIG, "quantization": {"mode": "mxfp4"}})
    build(source, tmp_path / "package", Recipe(bits=4, group_size=32, **DENSE_HEAD))
    found = json.loads((tmp_path / "package" / "config.json").read_text())["quantization"]
    assert (found["mode"], found["lm_head"]["mode"]) == ("mxfp4", "affine")


# Heads


def test_a_head_in_a_file_of_its_own_comes_into_the_package(tmp_path: Path) -> None:
    stored: Any = mx.load(str(find_model(REFERENCE) / "model.safetensors"))
    head = {name.removeprefix("mtp."): tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    trunk = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")}
    config = json.loads((find_model(REFERENCE) / "config.json").read_text())
    source = add_text_side(save(tmp_path / "source", trunk, config, beside=head))
    build(source, tmp_path / "package", Recipe.named("8bit", **DENSE_HEAD))
    build(find_model(REFERENCE), tmp_path / "other", Recipe.named("8bit", **DENSE_HEAD))
    assert classify(tmp_path / "package").head.source == "embedded"
    assert stored_bits(tmp_path / "package") == stored_bits(tmp_path / "other")
    assert not (tmp_path / "package" / "mtp.safetensors").exists()

    wrong = {name: mx.random.permutation(tensor) for name, tensor in head.items()}
    mx.save_safetensors(str(source / "mtp.safetensors"), wrong)
    with pytest.raises(CheckpointError, match=r"drafts .* it was not trained with this trunk"):
        build(source, tmp_path / "foreign", Recipe.named("8bit", **DENSE_HEAD))
    assert listing(tmp_path) == {"source", "package", "other"}


def test_a_source_without_a_head_comes_to_a_plain_package(tmp_path: Path, tensors: Tensors) -> None:
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    built = build(save(tmp_path / "source", trunk), tmp_path / "package", Recipe.named("4bit"))
    assert (built.head, (tmp_path / "package" / HEAD_FILE).exists()) == (None, False)
    assert built.notes == ("without a head: config.json claims 1 MTP layer(s), but the weights hold no mtp tensors",)
    assert load_folder(tmp_path / "package").model.max_depth == 0


def test_a_broken_head_is_left_out_with_the_reason(tmp_path: Path, tensors: Tensors) -> None:
    broken = {name: tensor for name, tensor in tensors.items() if name != "mtp.norm.weight"}
    built = build(save(tmp_path / "source", broken), tmp_path / "package", Recipe.named("4bit"))
    assert built.notes == ("without a head: the MTP head lacks 'mtp.norm.weight' (1 of 15 tensors missing)",)
    assert not any(name.startswith("mtp.") for name in stored_bits(tmp_path / "package"))


def test_tied_embeddings(tmp_path: Path) -> None:
    tied = nano_model(seed=2, tie_word_embeddings=True)
    stored = tensors_of(tied) | {"lm_head.weight": mx.zeros((16, 64))}
    source = save(tmp_path / "source", stored, {**NANO_CONFIG, "tie_word_embeddings": True})
    build(source, tmp_path / "package", Recipe.named("dense", **DENSE_HEAD))
    assert "lm_head.weight" not in stored_bits(tmp_path / "package")
    assert same_outputs(load_folder(tmp_path / "package").model, load_folder(source, dtype=mx.bfloat16).model)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_projection_that_takes_the_hidden_first_is_turned_round(tmp_path: Path, bits: int | None) -> None:
    model = nano_model(seed=7, bits=bits, dtype=mx.bfloat16)
    stored = tensors_of(model)
    turned = {
        name: mx.concatenate(list(mx.split(tensor, 2, axis=-1))[::-1], axis=-1)
        if name.startswith("mtp.fc.")
        else tensor
        for name, tensor in stored.items()
    }
    source = save(tmp_path / "source", turned)
    build(source, tmp_path / "package", Recipe(bits=16, head_order="hidden-first", **DENSE_HEAD))
    assert same_outputs(load_folder(tmp_path / "package").model, model)


def test_norms_are_stored_as_it_is_said(tmp_path: Path, tensors: Tensors) -> None:
    raw = zero_centred(tensors)
    source = save(tmp_path / "source", raw)
    build(source, tmp_path / "package", Recipe(bits=16, head_norms="zero-centred", **DENSE_HEAD))
    assert same_outputs(load_folder(tmp_path / "package").model, load_folder(source, dtype=mx.bfloat16).model)
    with pytest.raises(CheckpointError, match=r"the head's norms, stored as 1 \+ w, would be read as 'zero-centred'"):
        build(source, tmp_path / "wrong", Recipe(bits=16, head_norms="one-plus", **DENSE_HEAD))
    assert listing(tmp_path) == {"source", "package"}


# Stock mlx-lm


@pytest.mark.parametrize("recipe", [*NAMED, "rules"])
def test_stock_mlx_lm_loads_a_package(tmp_path: Path, recipe: str) -> None:
    from mlx_lm.utils import load_model

    rules = (("*.layers.0.*", 3), ("*.o_proj", 16))
    wanted = Recipe(rules=rules, **DENSE_HEAD) if recipe == "rules" else Recipe.named(recipe, **DENSE_HEAD)
    source = find_model(REFERENCE)
    build(source, tmp_path / "package", wanted)
    assert_stock(tmp_path / "package", load_model)


def test_stock_mlx_lm_loads_a_package_with_a_vision_tower(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    source = random_checkpoint(RANDOM["multimodal"], tmp_path / "source")
    build(source, tmp_path / "package", Recipe.named("4bit", group_size=32, **DENSE_HEAD))
    assert_stock(tmp_path / "package", load_model)


def assert_stock(package: Path, load_model: Any) -> None:
    """Equal logits of the trunk in float32, where both compute alike but for the order of sums."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock, config = load_model(package)
    stock.set_dtype(mx.float32)
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    loaded = build_model(classify(package), with_head=False, dtype=mx.float32)
    ours: Any = loaded.model
    hidden, _ = ours.forward(tokens, [ours.new_state()], keep_steps=False)
    assert mx.allclose(stock(tokens), ours.logits(hidden), rtol=1e-4, atol=2e-3).item()
    assert ("quantization" in config) == any("bit" in form for form in loaded.quantisation)
    formats = {
        path: (layer.bits, layer.group_size)
        for path, layer in stock.named_modules()
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding)
    }
    assert len(formats) == sum(count for form, count in loaded.quantisation.items() if form != "dense")


# Refused


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "mtp.fc.weight", "model.layers.0.linear_attn.A_log"]
)
def test_what_is_not_finite_is_named(tmp_path: Path, tensors: Tensors, name: str, value: float, dtype: Any) -> None:
    broken = mx.array(tensors[name])
    broken[-1] = value
    source = save(tmp_path / "source", {**tensors, name: broken})
    with pytest.raises(CheckpointError, match=name):
        build(source, tmp_path / "package", Recipe.named("4bit", dtype=dtype))
    assert listing(tmp_path) == {"source"}


def test_scales_that_are_not_finite_are_named(tmp_path: Path) -> None:
    stored = tensors_of(nano_model(seed=1, bits=4))
    stored["lm_head.scales"] = mx.full(stored["lm_head.scales"].shape, float("nan"))
    with pytest.raises(CheckpointError, match=r"lm_head\.scales holds values that are not finite"):
        build(save(tmp_path / "source", stored), tmp_path / "package", Recipe.named("4bit"))


def test_what_float16_cannot_hold_is_named(tmp_path: Path, tensors: Tensors) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    large = {**tensors, name: 1e6 * tensors[name]}
    source = save(tmp_path / "source", large)
    with pytest.raises(CheckpointError, match=f"{name} holds values that float16 cannot.*--dtype bfloat16"):
        build(source, tmp_path / "package", Recipe.named("4bit", dtype="float16"))
    assert listing(tmp_path) == {"source"}
    build(source, tmp_path / "package", Recipe.named("4bit", **DENSE_HEAD))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("disk", r"needs [\d.]+ GB on the disk of .* choose another --output"),
        ("memory", r"the whole package, needs [\d.]+ GB of memory.* --head dense"),
    ],
)
def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, named: str
) -> None:
    class Full:
        free = 10**6

    if what == "disk":
        monkeypatch.setattr(rooms.shutil, "disk_usage", lambda path: Full)
    else:
        monkeypatch.setattr(rooms, "free_memory", lambda: 20 * 10**6)
    monkeypatch.setattr("shutil.copyfile", lambda *args: pytest.fail("something was written"))
    with pytest.raises(SelfdraftError, match=named):
        build(find_model(REFERENCE), tmp_path / "package", Recipe.named("dense"))
    assert listing(tmp_path) == set()


def test_memory_for_the_head_is_asked_for_only_to_measure_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 8192 * 384 * 2
    monkeypatch.setattr(rooms, "free_memory", lambda: 6 * largest)
    build(find_model(REFERENCE), tmp_path / "package", Recipe.named("4bit", **DENSE_HEAD))
    monkeypatch.setattr(rooms, "free_memory", lambda: 6 * largest - 1)
    with pytest.raises(SelfdraftError, match=r"quantising the largest tensor needs 0\.0 GB of memory"):
        build(find_model(REFERENCE), tmp_path / "other", Recipe.named("4bit", **DENSE_HEAD))


# Memory


def peak_of(source: Path, target: Path) -> int:
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    build(source, target, Recipe.named("4bit", **DENSE_HEAD))
    return mx.get_peak_memory() - before


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """Whatever the number of layers: a model of 24 takes as much as one of 6."""
    config = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24}
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 12}
    model = nano_model(seed=8, dtype=mx.bfloat16, **config, **kinds)
    source = save(tmp_path / "source", tensors_of(model), {**NANO_CONFIG, **config, **kinds}, shards=3)
    del model
    checkpoint = classify(source)
    largest = max(tensor.nbytes for tensor in checkpoint.tensors.values())
    whole = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert whole > 30 * largest
    assert peak_of(source, tmp_path / "package") < 6 * largest


def test_memory_of_stacked_experts(tmp_path: Path) -> None:
    """A stack is a tensor as large as all its experts, which come from one that gates share, or one by one."""
    family = FAMILIES["qwen3_5_moe"]
    source = write_family(family, tmp_path / "source")
    largest = max(tensor.nbytes for tensor in classify(source).tensors.values())
    whole = sum(tensor.nbytes for tensor in classify(source).tensors.values())
    assert peak_of(source, tmp_path / "package") < min(6 * largest, whole)


# Where it lies


def test_a_target_that_is_there_is_left_alone(tmp_path: Path) -> None:
    for name, make in (("folder", Path.mkdir), ("file", Path.touch), ("link", lambda path: path.symlink_to("nowhere"))):
        make(tmp_path / name)
        with pytest.raises(SelfdraftError, match=f"{name} is there already: remove it, or choose another --output"):
            build(find_model(REFERENCE), tmp_path / name, Recipe.named("4bit"))
    assert listing(tmp_path) == {"folder", "file", "link"}
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SelfdraftError, match="nothing is no folder: make it first"):
        build(find_model(REFERENCE), tmp_path / "nothing" / "package", Recipe.named("4bit"))
    assert listing(tmp_path) == set()


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    source = random_checkpoint(RANDOM["multimodal"], tmp_path / "source")
    build(source, tmp_path / "package", Recipe.named("4bit", **DENSE_HEAD), progress=lambda *told: seen.append(told))
    assert {what for what, _, _ in seen} == {"weights"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == seen[-1][2] > 0
    assert len(seen) > 20
