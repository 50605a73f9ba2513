"""Guards that a checkpoint is either loaded exactly as it was stored, or refused with the name of what is wrong.

Layouts (Hugging Face and MLX, quantised, sharded, multimodal) must give the same bits as the model they were written
from; anything missing, surplus, doubled, misshapen or broken must be named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from selfdraft import CheckpointError, InvalidRequest, SamplingParams, load
from selfdraft.models.checkpoint import classify
from selfdraft.models.folder import read_json
from selfdraft.models.loader import build_model
from selfdraft.source import REFERENCE, find_model
from tests.support.checkpoints import (
    Tensors,
    add_text_side,
    is_zero_centred,
    load_folder,
    renamed,
    same_outputs,
    save,
    snap_norms,
    tensors_of,
    zero_centred,
)
from tests.support.nano import NANO_CONFIG, nano_model


@pytest.fixture(scope="module")
def model() -> Any:
    made = nano_model(seed=1)
    snap_norms(made)
    return made


@pytest.fixture
def tensors(model: Any) -> Tensors:
    return tensors_of(model)


def refusal(folder: Path) -> str:
    """The message a folder is refused with."""
    with pytest.raises(CheckpointError) as caught:
        load_folder(folder)
    return str(caught.value)


# Layouts and names


def multimodal(name: str) -> str:
    """As Hugging Face names the text part of a multimodal checkpoint; the head stands outside."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def mlx_vlm(name: str) -> str:
    return f"language_model.{name}"


def head_inside_model(name: str) -> str:
    return f"model.{name}" if name.startswith("mtp.") else name


def head_inside_language_model(name: str) -> str:
    return f"model.language_model.{name}" if name.startswith("mtp.") else multimodal(name)


NAMINGS: list[Callable[[str], str]] = [str, multimodal, mlx_vlm, head_inside_model, head_inside_language_model]


@pytest.mark.parametrize("naming", NAMINGS, ids=["flat", *(f.__name__ for f in NAMINGS[1:])])
@pytest.mark.parametrize("layout", ["huggingface", "mlx"])
def test_layouts_and_names_give_the_same_bits(
    tmp_path: Path, model: Any, tensors: Tensors, layout: str, naming: Callable[[str], str]
) -> None:
    stored = zero_centred(tensors) if layout == "huggingface" else tensors
    folder = save(tmp_path, renamed(stored, naming))
    checkpoint = classify(folder)
    convention = "zero-centred" if layout == "huggingface" else "one-plus"
    assert (checkpoint.layout, checkpoint.norms, checkpoint.head.norms) == (layout, convention, convention)
    assert (checkpoint.head.source, checkpoint.head.reason, checkpoint.notes) == ("embedded", "", [])
    assert same_outputs(load_folder(folder).model, model)


@pytest.mark.parametrize("head_as", ["zero-centred", "one-plus"])
def test_head_and_trunk_may_store_their_norms_differently(
    tmp_path: Path, model: Any, tensors: Tensors, head_as: str
) -> None:
    """Converters shift the trunk and forget the head, or the other way round."""
    raw = zero_centred(tensors)
    head, trunk = (raw, tensors) if head_as == "zero-centred" else (tensors, raw)
    mixed = {name: (head if name.startswith("mtp.") else trunk)[name] for name in tensors}
    checkpoint = classify(save(tmp_path, mixed))
    assert checkpoint.head.norms == head_as
    assert checkpoint.norms == ("one-plus" if head_as == "zero-centred" else "zero-centred")
    assert same_outputs(load_folder(tmp_path).model, model)


def test_norms_are_told_by_their_values_when_the_convolution_says_otherwise(
    tmp_path: Path, model: Any, tensors: Tensors
) -> None:
    """MLX axes do not prove that the norms were shifted."""
    raw = zero_centred(tensors)
    half = {name: raw[name] if is_zero_centred(name) else tensors[name] for name in tensors}
    checkpoint = classify(save(tmp_path, half))
    assert (checkpoint.layout, checkpoint.norms) == ("mlx", "zero-centred")
    assert same_outputs(load_folder(tmp_path).model, model)


@pytest.mark.parametrize("prefix", ["model.visual.", "visual.", "vision_tower.", "model.vision_tower."])
def test_vision_tensors_are_told_apart(tmp_path: Path, model: Any, tensors: Tensors, prefix: str) -> None:
    vision = {f"{prefix}blocks.0.norm1.weight": mx.ones(4), f"{prefix}patch_embed.proj.weight": mx.ones((4, 3))}
    folder = save(tmp_path, renamed(tensors, multimodal) | vision)
    checkpoint = classify(folder)
    assert checkpoint.notes == []
    assert checkpoint.tower().keys() == {"blocks.0.norm1.weight", "patch_embed.proj.weight"}
    assert checkpoint.weight_bytes(None, tower=True) - checkpoint.weight_bytes(None) == 4 * (4 + 12)
    assert same_outputs(load_folder(folder).model, model)


@pytest.mark.parametrize("head_as", ["zero-centred", "one-plus"])
def test_the_reference_model_as_a_conversion_to_mlx(tmp_path: Path, reference_bf16: Any, head_as: str) -> None:
    """With trained norms, which lie far from where they began: the trunk shifted, the head too or not."""
    converted = tensors_of(reference_bf16)
    if head_as == "zero-centred":
        raw = zero_centred(converted)
        converted = {name: (raw if name.startswith("mtp.") else converted)[name] for name in converted}
    folder = save(tmp_path, renamed(converted, mlx_vlm), read_json(find_model(REFERENCE) / "config.json"))
    checkpoint = classify(folder)
    assert (checkpoint.layout, checkpoint.norms, checkpoint.head.norms) == ("mlx", "one-plus", head_as)
    assert same_outputs(load_folder(folder).model, reference_bf16)


def test_nested_configuration(tmp_path: Path, model: Any, tensors: Tensors) -> None:
    nested = {"model_type": "qwen3_5", "text_config": NANO_CONFIG, "vision_config": {"depth": 2}}
    folder = save(tmp_path, tensors, nested)
    assert classify(folder).model_type == "qwen3_5_text"
    assert same_outputs(load_folder(folder).model, model)


@pytest.mark.parametrize("shards", [2, 5])
def test_sharded(tmp_path: Path, model: Any, tensors: Tensors, shards: int) -> None:
    folder = save(tmp_path, zero_centred(tensors), shards=shards)
    (folder / "model-of-something-else.safetensors").write_bytes(b"not listed, so not read")
    assert same_outputs(load_folder(folder).model, model)


def test_tied_embeddings_with_a_stored_output_projection(tmp_path: Path) -> None:
    tied = nano_model(seed=2, tie_word_embeddings=True)
    stored = tensors_of(tied) | {"lm_head.weight": mx.random.normal((16, 64), key=mx.random.key(0))}
    folder = save(tmp_path, stored, {**NANO_CONFIG, "tie_word_embeddings": True})
    assert classify(folder).notes == [
        "lm_head.weight is stored although the embeddings are tied: the embedding is used"
    ]
    assert same_outputs(load_folder(folder).model, tied)


def test_tied_embeddings_with_a_quantised_output_projection(tmp_path: Path) -> None:
    tied = nano_model(seed=2, bits=4, tie_word_embeddings=True)
    packed, scales, biases = mx.quantize(mx.random.normal((16, 64), key=mx.random.key(0)), group_size=32, bits=4)
    stored = tensors_of(tied) | {"lm_head.weight": packed, "lm_head.scales": scales, "lm_head.biases": biases}
    folder = save(tmp_path, stored, {**NANO_CONFIG, "tie_word_embeddings": True})
    assert len(classify(folder).notes) == 1
    assert same_outputs(load_folder(folder).model, tied)


# Dtypes and quantisation


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dtype_of_dense_weights(tmp_path: Path, tensors: Tensors, dtype: mx.Dtype) -> None:
    folder = save(tmp_path, {name: tensor.astype(mx.bfloat16) for name, tensor in tensors.items()})
    kept, cast = load_folder(folder), load_folder(folder, dtype=dtype)
    assert (kept.dtype, cast.dtype) == (mx.bfloat16, dtype)
    # Decay rates span orders of magnitude and stay in float32.
    for name, tensor in tensors_of(cast.model).items():
        assert tensor.dtype == (mx.float32 if name.endswith("A_log") else dtype), name


def dense_head(path: str) -> bool | dict[str, Any]:
    return not path.startswith("mtp.")


def mixed(path: str) -> bool | dict[str, Any]:
    """A usual build: 4-bit trunk, some layers at 8 bits, embedding and output projection 8-bit, head left alone."""
    if path.startswith("mtp."):
        return False
    if "embed_tokens" in path or "lm_head" in path or "down_proj" in path:
        return {"bits": 8, "group_size": 64}
    return {"bits": 4, "group_size": 32 if "q_proj" in path else 64}


def quantised_head(path: str) -> bool | dict[str, Any]:
    """4-bit head whose fc is left alone, on an 8-bit trunk."""
    if path == "mtp.fc":
        return False
    return {"bits": 4 if path.startswith("mtp.") else 8, "group_size": 32}


QUANTISATIONS: dict[str, dict[str, Any]] = {
    "4-bit-group-64": {"bits": 4, "group_size": 64},
    "4-bit-group-32": {"bits": 4, "group_size": 32},
    "8-bit-group-64": {"bits": 8, "group_size": 64},
    "3-bit": {"bits": 3, "group_size": 32},
    "dense-head": {"bits": 4, "group_size": 64, "choose": dense_head},
    "mixed": {"bits": 4, "group_size": 64, "choose": mixed},
    "quantised-head": {"bits": 8, "group_size": 32, "choose": quantised_head},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
}


@pytest.mark.parametrize("layout", ["mlx", "huggingface"])
@pytest.mark.parametrize("name", QUANTISATIONS)
def test_quantised_weights_load_as_they_were_stored(tmp_path: Path, name: str, layout: str) -> None:
    settings = dict(QUANTISATIONS[name])
    choose = settings.pop("choose", lambda path: True)
    model = nano_model(seed=4, dtype=mx.bfloat16)
    snap_norms(model)

    def predicate(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        chosen: bool | dict[str, Any] = choose(path) if hasattr(layer, "to_quantized") else False
        return chosen

    nn.quantize(model, **settings, class_predicate=predicate)
    stored = tensors_of(model)
    # The configuration names one format only: the tensors decide.
    config = {**NANO_CONFIG, "quantization": settings, "quantization_config": settings}
    folder = save(tmp_path, zero_centred(stored) if layout == "huggingface" else stored, config)
    loaded = load_folder(folder)

    formats = layer_formats(model)
    assert layer_formats(loaded.model) == formats
    found = [form for form in formats.values() if form]
    assert {name: found.count(name) for name in found} == loaded.quantisation
    assert classify(folder).quantised
    assert loaded.dtype == mx.bfloat16
    assert same_outputs(loaded.model, model)


def layer_formats(model: Any) -> dict[str, str]:
    """How every layer's weight is held, by path."""
    return {path: layer_format(layer) for path, layer in model.named_modules()}


def layer_format(layer: nn.Module) -> str:
    if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
        mode = "" if layer.mode == "affine" else f" {layer.mode}"
        return f"{layer.bits}-bit group {layer.group_size}{mode}"
    return "dense" if isinstance(layer, nn.Linear | nn.Embedding) else ""


def test_missing_scales_are_named(tmp_path: Path) -> None:
    stored = tensors_of(nano_model(bits=4))
    del stored["model.layers.0.mlp.up_proj.scales"]
    assert "model.layers.0.mlp.up_proj" in refusal(save(tmp_path, stored))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "bitsandbytes", "bits": 4}, "'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "with 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        ({"quant_method": "fp8", "weight_block_size": [1, 128]}, r"[1, 128]"),
    ],
)
def test_foreign_quantisation_is_refused_by_name(
    tmp_path: Path, tensors: Tensors, settings: dict[str, Any], named: str
) -> None:
    folder = save(tmp_path, tensors, {**NANO_CONFIG, "quantization_config": settings})
    message = refusal(folder)
    assert named in message
    assert "bf16" in message


# What is wrong is named


def test_missing_shard(tmp_path: Path, tensors: Tensors) -> None:
    folder = save(tmp_path, tensors, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.0.linear_attn.A_log", "model.layers.1.self_attn.q_norm.weight"],
)
def test_missing_tensor(tmp_path: Path, tensors: Tensors, name: str) -> None:
    del tensors[name]
    assert name in refusal(save(tmp_path, tensors))


def test_missing_output_projection(tmp_path: Path, tensors: Tensors) -> None:
    del tensors["lm_head.weight"]
    assert "lm_head.weight" in refusal(save(tmp_path, tensors))


def test_surplus_tensor(tmp_path: Path, tensors: Tensors) -> None:
    tensors["model.layers.1.self_attn.sinks"] = mx.zeros(2)
    message = refusal(save(tmp_path, tensors))
    assert "surplus" in message
    assert "model.layers.1.self_attn.sinks" in message


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_wrong_shape(tmp_path: Path, tensors: Tensors, name: str) -> None:
    tensors[name] = mx.zeros((64, 65))
    message = refusal(save(tmp_path, tensors))
    assert name in message
    assert "[64, 65]" in message


def test_duplicate_tensor_in_two_shards(tmp_path: Path, tensors: Tensors) -> None:
    folder = save(tmp_path, tensors, shards=2)
    second = folder / "model-00002-of-00002.safetensors"
    mx.save_safetensors(str(second), {**mx.load(str(second)), "model.norm.weight": mx.ones(64)})  # type: ignore[dict-item]
    first = folder / "model-00001-of-00002.safetensors"
    mx.save_safetensors(str(first), {**mx.load(str(first)), "model.norm.weight": mx.ones(64)})  # type: ignore[dict-item]
    message = refusal(folder)
    assert "model.norm.weight" in message
    assert "twice" in message


def test_one_tensor_under_two_names(tmp_path: Path, tensors: Tensors) -> None:
    tensors["language_model.mtp.fc.weight"] = tensors["mtp.fc.weight"]
    assert "mtp.fc.weight" in refusal(save(tmp_path, tensors))


def test_many_problems_are_counted(tmp_path: Path, tensors: Tensors) -> None:
    kept = {name: tensor for name, tensor in tensors.items() if "mlp" not in name}
    assert "and 4 more" in refusal(save(tmp_path, kept))  # 9 of them


def test_no_such_folder(tmp_path: Path) -> None:
    assert "config.json" in refusal(tmp_path / "nothing")


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NANO_CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "model*.safetensors" in refusal(tmp_path)


BROKEN = ['{"model_type": "qwen3_5_text",', "", "[1, 2]", "null", '"qwen"', "\x00\x01"]


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_broken_json_names_the_file(tmp_path: Path, tensors: Tensors, file: str, text: str) -> None:
    folder = save(tmp_path, tensors)
    (folder / file).write_text(text)
    assert file in refusal(folder)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": null}', '{"weight_map": ["model.safetensors"]}'])
def test_index_without_a_weight_map(tmp_path: Path, tensors: Tensors, index: str) -> None:
    folder = save(tmp_path, tensors)
    (folder / "model.safetensors.index.json").write_text(index)
    refusal(folder)


@pytest.mark.parametrize("text_config", [None, "qwen3_5_text", ["a"]])
def test_text_configuration_of_the_wrong_type(tmp_path: Path, tensors: Tensors, text_config: Any) -> None:
    refusal(save(tmp_path, tensors, {"model_type": "qwen3_5", "text_config": text_config}))


@pytest.mark.parametrize("keep", [0, 4, 100, -8, -1])
def test_truncated_safetensors(tmp_path: Path, tensors: Tensors, keep: int) -> None:
    """Cut in the length field, in the header, in the last tensor."""
    folder = save(tmp_path, tensors)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("content", [b"<html>not found</html>" * 20, b"version https://git-lfs.github.com/spec/v1\n"])
def test_something_else_under_the_name_of_weights(tmp_path: Path, tensors: Tensors, content: bytes) -> None:
    """A download that went wrong, a pointer of git-lfs."""
    folder = save(tmp_path, tensors)
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(folder)


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {}, {"model_type": None}])
def test_unsupported_model_type_lists_the_supported_ones(tmp_path: Path, config: dict[str, Any]) -> None:
    message = refusal(save(tmp_path, {}, config))
    assert repr(config.get("model_type")) in message
    assert "qwen3_5, qwen3_5_moe" in message


@pytest.mark.parametrize("field", ["hidden_size", "linear_num_key_heads", "num_hidden_layers", "rms_norm_eps"])
def test_missing_configuration_field_is_named(tmp_path: Path, tensors: Tensors, field: str) -> None:
    config = {name: value for name, value in NANO_CONFIG.items() if name != field}
    message = refusal(save(tmp_path, tensors, config))
    assert repr(field) in message
    assert "qwen3_5_text" in message


@pytest.mark.parametrize("types", [["linear_attention"], ["full_attention", "sliding_attention", "full_attention"]])
def test_layer_types_that_do_not_fit(tmp_path: Path, tensors: Tensors, types: list[str]) -> None:
    assert "layer_types" in refusal(save(tmp_path, tensors, {**NANO_CONFIG, "layer_types": types}))


# Heads that are not there


def loaded_note(folder: Path) -> list[str]:
    """The notes of a folder that decodes without its head; it is checked that it does."""
    llm = load(str(add_text_side(folder)))
    assert llm.max_depth == 0
    generation = llm.generate([1, 2, 3], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    assert generation.timings.emitted["plain"] == 2
    with pytest.raises(InvalidRequest, match="no MTP head is in use"):
        llm.generate([1, 2, 3], SamplingParams(depth=1, max_tokens=3))
    return llm.notes


@pytest.mark.parametrize("key", ["mtp_num_hidden_layers", "num_nextn_predict_layers"])
def test_claimed_head_without_tensors_means_plain_decoding(tmp_path: Path, tensors: Tensors, key: str) -> None:
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    config = {name: value for name, value in NANO_CONFIG.items() if name != "mtp_num_hidden_layers"}
    folder = save(tmp_path, trunk, {**config, key: 1})
    assert loaded_note(folder) == [
        "plain decoding: config.json claims 1 MTP layer(s), but the weights hold no mtp tensors"
    ]


def test_no_head_and_no_claim(tmp_path: Path, tensors: Tensors) -> None:
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    folder = save(tmp_path, trunk, {**NANO_CONFIG, "mtp_num_hidden_layers": 0})
    assert loaded_note(folder) == ["plain decoding: the checkpoint has no MTP head"]


def test_head_without_a_claim_is_used(tmp_path: Path, model: Any, tensors: Tensors) -> None:
    """Tensors are trusted, not the configuration."""
    folder = save(tmp_path, tensors, {**NANO_CONFIG, "mtp_num_hidden_layers": 0})
    assert classify(folder).head.reason == ""
    assert same_outputs(load_folder(folder).model, model)


@pytest.mark.parametrize("lacking", ["mtp.fc.weight", "mtp.layers.0.self_attn.k_norm.weight"])
def test_partial_head_means_plain_decoding(tmp_path: Path, tensors: Tensors, lacking: str) -> None:
    del tensors[lacking]
    assert loaded_note(save(tmp_path, tensors)) == [
        f"plain decoding: the MTP head lacks {lacking!r} (1 of 15 tensors missing)"
    ]


def test_head_of_another_size_means_plain_decoding(tmp_path: Path, tensors: Tensors) -> None:
    tensors["mtp.fc.weight"] = mx.zeros((64, 64))
    assert loaded_note(save(tmp_path, tensors)) == [
        "plain decoding: the MTP head cannot be used: mtp.fc.weight has shape [64, 64], not [64, 128]"
    ]


def test_quantised_head_without_a_packed_weight_means_plain_decoding(tmp_path: Path) -> None:
    stored = tensors_of(nano_model(bits=4))
    del stored["mtp.layers.0.mlp.up_proj.weight"]
    (note,) = loaded_note(save(tmp_path, stored))
    assert "lacks 'mtp.layers.0.mlp.up_proj.weight'" in note


def test_head_of_another_kind_means_plain_decoding(tmp_path: Path, tensors: Tensors) -> None:
    tensors["mtp.layers.0.mlp.experts.0.up_proj.weight"] = mx.zeros((2, 2))
    (note,) = loaded_note(save(tmp_path, tensors))
    assert "'mtp.layers.0.mlp.experts.0.up_proj.weight'" in note


def test_trunk_loads_without_its_head(tmp_path: Path, model: Any, tensors: Tensors) -> None:
    loaded = build_model(classify(save(tmp_path, tensors)), with_head=False).model
    assert loaded.max_depth == 0
    assert same_outputs(loaded, model, with_head=False)


def test_progress_covers_all_bytes(tmp_path: Path, tensors: Tensors) -> None:
    seen: list[tuple[int, int]] = []
    loaded = load_folder(save(tmp_path, tensors), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert len(seen) > 10
    assert seen[-1] == (loaded.nbytes, loaded.nbytes)
