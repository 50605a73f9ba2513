"""`selfdraft inspect`: says what the classifier found and what will run, and loads weights only to probe a head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.cli.found_models import described
from selfdraft.llm import LLM
from selfdraft.settings import Settings
from selfdraft.source import REFERENCE, find_model
from selfdraft.stamp import Stamp, write_stamp

from ..models.test_families import write_checkpoint as write_family
from ..reference.families import FAMILIES
from ..support.nano import nano_model, write_checkpoint
from .conftest import Command

Tensors = dict[str, mx.array]


@pytest.fixture
def variant(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the reference checkpoint, its head's tensors moved to where `head` says or changed by it."""

    def make(*, separate: bool = False, change: Callable[[Tensors], Tensors] = lambda head: head) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(find_model(REFERENCE), folder)
        stored = mx.load(str(folder / "model.safetensors"))
        assert isinstance(stored, dict)
        head = {name: tensor for name, tensor in stored.items() if "mtp." in name}
        trunk = {name: tensor for name, tensor in stored.items() if name not in head}
        head = change(head)
        mx.eval(head, trunk)  # before the file that they are read from is replaced
        (folder / "model.safetensors").unlink()
        mx.save_safetensors(str(folder / "model.safetensors"), trunk if separate else {**trunk, **head})
        if separate:
            mx.save_safetensors(str(folder / "mtp.safetensors"), head)
        return folder

    return make


@pytest.fixture
def report(light: Command) -> Callable[..., dict[str, Any]]:
    def call(model: object) -> dict[str, Any]:
        ended = light("inspect", "--json", str(model))
        assert (ended.code, ended.err) == (0, "")
        body: dict[str, Any] = json.loads(ended.out)
        return body

    return call


def test_the_reference_model(report: Callable[..., dict[str, Any]], light: Command, llm: LLM) -> None:
    body = report("reference")
    folder = find_model(REFERENCE)
    config = json.loads((folder / "config.json").read_text())["text_config"]
    assert body == {
        "schema_version": 1,
        "model": "reference",
        "folder": str(folder),
        "model_type": "qwen3_5_text",
        "verified": body["verified"],
        "layers": config["num_hidden_layers"],
        "layer_types": {"linear_attention": 6, "full_attention": 2},
        "hidden_size": config["hidden_size"],
        "vocabulary": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "layout": "huggingface",
        "norms": {"trunk": "zero-centred", "head": "zero-centred"},
        "weights_bytes": body["weights_bytes"],
        "stored_dtype": "bfloat16",
        "quantisation": {"dense": body["quantisation"]["dense"]},
        "head": {"source": "embedded", "tensors": 15, "usable": True, "probed": False, "reason": ""},
        "vision": {"tensors": 0, "nbytes": 0, "reason": "the checkpoint has no vision tower"},
        "adapter": None,
        "max_depth": 8,
        "sampling_defaults": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        "chat_template": True,
        "thinking": True,
        "stamp": None,
        "notes": [],
        "device": {name: llm.describe()[name] for name in ("device", "blas", "dtype")},  # what a load comes to
        "runs": "self-speculative decoding, depth auto (up to 8)",
    }
    size = (folder / "model.safetensors").stat().st_size
    assert 0 < size - body["weights_bytes"] < 50_000  # but for the header
    text = light("inspect").out
    assert "transformers" in body["verified"]
    for words in (
        f"verified on    {body['verified']}",
        "8 (6 linear attention, 2 full attention)",
        "embedded, 15 tensors; usable",
        "vision tower   none: the checkpoint has no vision tower",
        body["runs"],
    ):
        assert words in text


def test_a_claimed_head_without_tensors(
    variant: Callable[..., Path], report: Callable[..., dict[str, Any]], light: Command
) -> None:
    folder = variant(change=lambda head: {})
    body = report(folder)
    reason = "config.json claims 1 MTP layer(s), but the weights hold no mtp tensors"
    assert body["head"] == {"source": "none", "tensors": 0, "usable": False, "probed": False, "reason": reason}
    assert body["norms"]["head"] is None
    assert body["max_depth"] == 0
    assert body["runs"] == f"plain decoding: {reason}"
    assert f"will run       plain decoding: {reason}" in light("inspect", str(folder)).out


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(("limit", "said"), [(2, "depth auto (up to 2)"), (0, "plain decoding: no draft paid")])
def test_what_verify_measured_holds(
    variant: Callable[..., Path], report: Callable[..., dict[str, Any]], separate: bool, limit: int, said: str
) -> None:
    folder = variant(separate=separate)
    write_stamp(folder, Stamp({}, "source", verdict="no", reasons=("it is slow",), depth_limit=limit))
    body = report(folder)
    assert (body["max_depth"], body["head"]["usable"], body["head"]["reason"]) == (limit, True, "")
    assert said in body["runs"]
    assert body["notes"] == ["`forge verify` said no: it is slow"]


def test_a_separate_head_is_probed(variant: Callable[..., Path], report: Callable[..., dict[str, Any]]) -> None:
    body = report(variant(separate=True))
    assert body["head"]["source"] == "separate"
    assert (body["head"]["probed"], body["head"]["usable"], body["max_depth"]) == (True, True, 8)


def test_a_foreign_head_fails_the_probe(variant: Callable[..., Path], report: Callable[..., dict[str, Any]]) -> None:
    def another(head: Tensors) -> Tensors:
        return {
            name: mx.random.normal(tensor.shape, scale=0.02, key=mx.random.key(len(name))).astype(tensor.dtype)
            if tensor.ndim > 1
            else tensor
            for name, tensor in head.items()
        }

    body = report(variant(separate=True, change=another))
    assert (body["head"]["probed"], body["head"]["usable"], body["max_depth"]) == (True, False, 0)
    assert "not trained with this trunk" in body["head"]["reason"]
    assert body["runs"] == f"plain decoding: {body['head']['reason']}"


def test_quantised_layers_are_counted_without_loading(
    tmp_path: Path, report: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "open", None)
    folder = write_checkpoint(tmp_path / "nano", nano_model(bits=4))
    body = report(folder)
    formats = body["quantisation"]
    assert formats.pop("4-bit group 32") > 10
    assert set(formats) <= {"dense"}
    assert body["layout"] == "mlx"
    assert body["norms"] == {"trunk": "one-plus", "head": "one-plus"}
    assert body["sampling_defaults"] == {}
    assert (body["chat_template"], body["thinking"]) == (False, False)


def test_an_unsupported_model(tmp_path: Path, light: Command) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for flags in ([], ["--json"]):
        ended = light("inspect", str(tmp_path), *flags)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(f"selfdraft: {tmp_path}: model_type 'llama' is not supported; supported: ")


def test_what_a_load_would_refuse(variant: Callable[..., Path], light: Command) -> None:
    """Not said to run: not here, nor by `models` and `doctor`."""
    folder = variant(change=lambda head: {**head, "model.layers.99.norm.weight": mx.ones(2)})
    ended = light("inspect", str(folder))
    assert (ended.code, ended.out) == (1, "")
    assert "surplus model.layers.99.norm.weight" in ended.err
    found = described(str(folder), folder, Settings(), "folder")
    assert "surplus model.layers.99.norm.weight" in found.problem
    assert "surplus model.layers.99.norm.weight" in light("doctor", "--model", str(folder)).out


def test_sampling_defaults_that_cannot_be(variant: Callable[..., Path], light: Command) -> None:
    folder = variant()
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    ended = light("inspect", str(folder))
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"selfdraft: {folder / 'generation_config.json'}: temperature must be")


def test_kinds_are_counted_of_the_trunk_alone(tmp_path: Path, report: Callable[..., dict[str, Any]]) -> None:
    """Step-3.5 lists the layers of its head behind them."""
    body = report(write_family(FAMILIES["step3p5"], tmp_path))
    assert sum(body["layer_types"].values()) == body["layers"] == 4
