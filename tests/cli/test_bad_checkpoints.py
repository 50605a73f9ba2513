"""Guards that what is wrong with a checkpoint ends in one line that names it, whichever command meets it.

One classifier decides for `forge probe`, `forge build`, `inspect` and for loading: they say the same, exit with 1, and
leave nothing behind.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from selfdraft.cli.app import main
from tests.models.test_foreign import CASES, coded_tensors
from tests.models.test_foreign import CONFIG as CODED_CONFIG
from tests.support.checkpoints import add_text_side, save, tensors_of
from tests.support.forge import listing
from tests.support.nano import NANO_CONFIG, nano_model
from tests.support.tensor_files import LIES

from .conftest import Ended

COMMANDS: dict[str, list[str]] = {
    "probe": ["forge", "probe", "source"],
    "build": ["forge", "build", "source", "--output", "package"],
    "inspect": ["inspect", "source"],
    "load": ["run", "--model", "source", "--raw", "--max-tokens", "1", "a"],
}
NAME = "model.layers.1.mlp.up_proj.weight"

Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return add_text_side(save(folder, tensors_of(nano_model(seed=1, vocab_size=8192)), config(), shards=2))


def config(**fields: Any) -> dict[str, Any]:
    return {**NANO_CONFIG, "vocab_size": 8192, **fields}


@pytest.fixture
def source(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound, tmp_path / "source")
    return tmp_path / "source"


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    code = main(arguments)
    return Ended(code, *capsys.readouterr())


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
INDEX = "model.safetensors.index.json"


def stored(folder: Path, change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> None:
    """The same checkpoint in one file, with other tensors."""
    tensors: dict[str, mx.array] = {}
    for path in folder.glob("model*.safetensors"):
        tensors |= mx.load(str(path))  # type: ignore[arg-type]
    mx.eval(tensors)
    for path in [*folder.glob("model*.safetensors"), folder / INDEX]:
        path.unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), change(tensors))


def tensor(name: str, made: Callable[[mx.array], mx.array]) -> Spoil:
    return lambda folder: stored(folder, lambda tensors: {**tensors, name: made(tensors[name])})


def without(name: str) -> Spoil:
    return lambda folder: stored(folder, lambda tensors: {key: t for key, t in tensors.items() if key != name})


def configured(**fields: Any) -> Spoil:
    return lambda folder: (folder / "config.json").write_text(json.dumps(config(**fields))) and None


def text(file: str, content: str) -> Spoil:
    return lambda folder: (folder / file).write_text(content) and None


def cut(file: str, keep: int) -> Spoil:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:keep]) and None


def raw(content: bytes) -> Spoil:
    return lambda folder: (folder / SECOND).write_bytes(content) and None


def gone(*files: str) -> Spoil:
    return lambda folder: [(folder / file).unlink() for file in files] and None


def mapped(name: str) -> Spoil:
    """The index names a file for a tensor."""

    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][NAME] = name
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def pickled(folder: Path) -> None:
    gone(FIRST, SECOND, INDEX)(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": [1]}))


def a_pickle_by_another_name(folder: Path) -> None:
    (folder / SECOND).write_bytes(pickle.dumps({"a": [1]}))


def index_of_pickles(folder: Path) -> None:
    pickled(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {NAME: "pytorch_model.bin"}}))


def twice(folder: Path) -> None:
    for file in (FIRST, SECOND):
        tensors: Any = mx.load(str(folder / file))
        mx.eval(tensors)
        mx.save_safetensors(str(folder / file), {**tensors, "model.norm.weight": mx.ones(64)})


def coded(folder: Path) -> None:
    """AWQ without the zero points of one layer."""
    settings, codes, pack = CASES["awq"]
    tensors, _ = coded_tensors(codes, pack, tensors_of(nano_model(seed=1, **{**CODED_CONFIG})))
    del tensors[NAME.replace("weight", "qzeros")]
    shutil.rmtree(folder)
    save(folder, tensors, {**CODED_CONFIG, "quantization_config": settings})


BAD: dict[str, tuple[Spoil, str]] = {
    "no config": (gone("config.json"), "config.json"),
    "a config that is no JSON": (text("config.json", "{"), "config.json"),
    "a config that is a list": (text("config.json", "[]"), "config.json"),
    "a key twice in the config": (
        lambda folder: text("config.json", json.dumps(config())[:-1] + ', "vocab_size": 16}')(folder),
        "'vocab_size' stands there twice",
    ),
    "an unknown family": (configured(model_type="llama"), "'llama'"),
    "a config that names more layers": (
        configured(num_hidden_layers=4, layer_types=[*NANO_CONFIG["layer_types"], "full_attention"]),
        "missing model.layers.3.",
    ),
    "a config that names fewer layers": (
        configured(num_hidden_layers=2, layer_types=NANO_CONFIG["layer_types"][:2]),
        "surplus model.layers.2.",
    ),
    "a config of another size": (configured(hidden_size=96), "has shape"),
    "a config of another vocabulary": (configured(vocab_size=8000), "model.embed_tokens.weight"),
    "a config of a negative size": (configured(hidden_size=-64), "hidden_size"),
    "a config of a text as a number": (configured(num_attention_heads="2"), "num_attention_heads"),
    "a foreign quantisation that is not there": (
        configured(quantization_config={"quant_method": "bitsandbytes"}),
        "'bitsandbytes'",
    ),
    "no weights": (gone(FIRST, SECOND, INDEX), "no model*.safetensors there"),
    "a shard missing": (gone(SECOND), SECOND),
    "a shard and the index missing": (gone(SECOND, INDEX), "missing model."),
    "a shard empty": (cut(SECOND, 0), SECOND),
    "a shard cut off in its length": (cut(SECOND, 5), SECOND),
    "a shard cut off in its header": (cut(SECOND, 200), SECOND),
    "a shard cut off in a tensor": (cut(SECOND, -1), SECOND),
    "a tensor missing": (without(NAME), f"missing {NAME}"),
    "the embedding missing": (without("model.embed_tokens.weight"), "model.embed_tokens.weight"),
    "all norms missing": (
        lambda folder: stored(folder, lambda tensors: {k: t for k, t in tensors.items() if "norm" not in k}),
        "norm",
    ),
    "a tensor too many": (
        lambda folder: stored(folder, lambda tensors: {**tensors, "model.layers.1.mlp.bias": mx.ones(3)}),
        "surplus model.layers.1.mlp.bias",
    ),
    "a tensor of another shape": (tensor(NAME, lambda t: t[:, :-1]), NAME),
    "a tensor of another rank": (tensor(NAME, lambda t: t[None]), NAME),
    "a tensor of whole numbers": (tensor(NAME, lambda t: t.astype(mx.int32)), f"{NAME} is stored as"),
    "scales for a dense weight": (
        lambda folder: stored(folder, lambda tensors: {**tensors, NAME.replace("weight", "scales"): mx.ones((64, 2))}),
        "model.layers.1.mlp.up_proj",
    ),
    "a norm of NaN": (
        tensor("model.norm.weight", lambda t: t * float("nan")),
        "model.norm.weight holds values that are not finite",
    ),
    "a tensor in two shards": (twice, "'model.norm.weight' is stored twice"),
    "an index that is no JSON": (text(INDEX, "{"), INDEX),
    "an index without files": (text(INDEX, '{"weight_map": {}}'), "no model*.safetensors there"),
    "an index of numbers": (text(INDEX, '{"weight_map": {"a": 1}}'), INDEX),
    "an index that leads out of the folder": (mapped("../sound/model.safetensors"), "'../sound/model.safetensors'"),
    "an index that names a full path": (mapped("/etc/passwd.safetensors"), "'/etc/passwd.safetensors'"),
    "an index that names a hidden way out": (mapped("a/../../b.safetensors"), "'a/../../b.safetensors'"),
    "an index that names a folder": (mapped(".."), "'..'"),
    "a pickle alone": (pickled, "pytorch_model.bin is a pickle, which can run code"),
    "a pickle by another name": (a_pickle_by_another_name, SECOND),
    "an index of pickles": (index_of_pickles, "'pytorch_model.bin', which is no safetensors file"),
    "codes that lack a part": (coded, "model.layers.1.mlp.up_proj.qweight lacks 'qzeros'"),
    **{f"a shard with {name}": (raw(content), SECOND) for name, content in LIES.items()},
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_line(
    name: str, command: str, source: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spoil, named = BAD[name]
    spoil(source)
    before = listing(source)
    ended = called(capsys, *COMMANDS[command])
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("selfdraft: ")
    assert ended.err.count("\n") == 1
    assert named in ended.err
    assert "source" in ended.err
    assert listing(tmp_path) == {"source"}
    assert listing(source) == before


def test_a_sound_checkpoint_is_taken_by_all(source: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command, arguments in COMMANDS.items():
        more = ["--head", "dense"] if command == "build" else []
        assert called(capsys, *arguments, *more).code == 0
    assert listing(tmp_path) == {"source", "package"}


@pytest.mark.parametrize("command", ["build", "load"])
def test_a_weight_of_nan_is_found_once_weights_are_read(
    source: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    """`probe` and `inspect` read headers alone, and say so."""
    tensor(NAME, lambda t: t * float("nan"))(source)
    ended = called(capsys, *COMMANDS[command])
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert (NAME if command == "build" else "NaN") in ended.err
    assert listing(tmp_path) == {"source"}


@pytest.mark.parametrize("name", ["nowhere", "config.json", "own/er/name"])
def test_a_source_that_is_none(source: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").touch()
    for command in ("probe", "build"):
        ended = called(capsys, *(name if argument == "source" else argument for argument in COMMANDS[command]))
        assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert listing(tmp_path) == {"source", "config.json"}
