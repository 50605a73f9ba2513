"""Guards `selfdraft forge probe` and `build` as commands: what they say, their exit codes, and that a pipe is quiet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from selfdraft.models.checkpoint import classify
from selfdraft.source import REFERENCE, find_model
from tests.support.checkpoints import save, tensors_of
from tests.support.forge import listing, stored_bits
from tests.support.nano import NANO_CONFIG, nano_model

from .conftest import COMMAND, Command

QUICK = ("--head", "dense")  # nothing is measured

# Ctrl-C in the middle of a file, as a terminal sends it.
INTERRUPTED = """
import os, signal, sys
from selfdraft.cli.app import main
from selfdraft.forge.tensor_file import TensorWriter
write = TensorWriter.write
def interrupted(self, name, pieces):
    if name.startswith("model.layers.5."):
        os.kill(os.getpid(), signal.SIGINT)
    write(self, name, pieces)
if sys.argv[1] == "interrupted":
    TensorWriter.write = interrupted
sys.exit(main(["forge", "build", "reference", "-o", sys.argv[2], "--head", "dense"]))
"""


def test_probe_says_what_a_checkpoint_is_and_what_it_could_be(light: Command) -> None:
    ended = light("forge", "probe", "reference", "--json")
    assert (ended.code, ended.err) == (0, "")
    report = json.loads(ended.out)
    checkpoint = classify(find_model(REFERENCE))
    assert report["schema_version"] == 1
    assert report["model_type"] == "qwen3_5_text"
    assert report["head"] == {"source": "embedded", "tensors": 15, "usable": True, "reason": ""}
    assert report["norms"] == {"trunk": "zero-centred", "head": "zero-centred"}
    assert (report["dtype"], report["quantised"], report["layout"]) == ("bfloat16", False, "huggingface")
    assert report["bytes"] == sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    recipes = report["recipes"]
    assert recipes.keys() == {"4bit", "8bit", "mixed", "dense"}
    assert recipes["4bit"]["bytes"] < recipes["mixed"]["bytes"] < recipes["8bit"]["bytes"] < recipes["dense"]["bytes"]
    assert recipes["dense"]["bytes"] == report["bytes"] + 6 * 4 * 2  # decay rates, which are kept in float32
    assert recipes["4bit"]["disk_needed"] > recipes["4bit"]["bytes"]
    assert all(recipe["fits_disk"] is recipe["fits_memory"] is True for recipe in recipes.values())


def test_probe_for_people(light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfdraft.forge.room.free_memory", lambda: 1000)
    ended = light("forge", "probe", "reference")
    assert (ended.code, ended.err) == (0, "")
    assert "embedded, 15 tensors" in ended.out
    (row,) = [line for line in ended.out.splitlines() if line.startswith("4bit")]
    assert row.split() == ["4bit", "17", "MB", "yes", "NO"]


def test_probe_of_a_quantised_checkpoint_without_a_head(light: Command, tmp_path: Path) -> None:
    model = nano_model(bits=8, with_head=False)
    source = save(tmp_path, tensors_of(model), {**NANO_CONFIG, "quantization": {"bits": 8, "group_size": 32}})
    ended = light("forge", "probe", str(source))
    assert "none: config.json claims 1 MTP layer(s), but the weights hold no mtp tensors" in ended.out
    assert "stay as they are, whatever the recipe" in ended.out


def test_build_says_what_it_made(light: Command, tmp_path: Path) -> None:
    package = tmp_path / "package"
    ended = light("forge", "build", "reference", "--output", str(package), *QUICK)
    assert ended.code == 0
    assert str(package) in ended.out
    assert "17 MB of 42 MB" in ended.out
    assert ended.err == (
        f"selfdraft: next: `selfdraft forge verify {package}` measures whether it is worth running here\n"
    )
    assert classify(package).quantised


def test_build_with_a_sibling_and_rules(light: Command, tmp_path: Path) -> None:
    package = tmp_path / "package"
    flags = ("--bits", "8", "--group", "32", "--set", "lm_head=16", "--set", "*.o_proj=3", "--fp16-sibling", "--json")
    source = save(tmp_path / "source", tensors_of(nano_model(seed=1)))
    ended = light("forge", "build", str(source), "-o", str(package), *flags, *QUICK)
    assert (ended.code, ended.err) == (0, "")
    report = json.loads(ended.out)
    assert [each["folder"] for each in report["packages"]] == [str(package), f"{package}-fp16"]
    assert all(each["head"] is None and each["notes"] == [] for each in report["packages"])
    dtypes = [{raw[0] for raw in stored_bits(Path(each["folder"])).values()} for each in report["packages"]]
    assert dtypes == [{"BF16", "U32", "F32"}, {"F16", "U32", "F32"}]
    config = json.loads((package / "config.json").read_text())["quantization"]
    assert (config["bits"], config["group_size"]) == (8, 32)
    assert config["model.layers.1.self_attn.o_proj"]["bits"] == 3
    assert stored_bits(package)["lm_head.weight"][0] == "BF16"


def test_a_build_without_a_head_says_so(light: Command, tmp_path: Path) -> None:
    source = save(tmp_path / "source", tensors_of(nano_model(with_head=False)))
    ended = light("forge", "build", str(source), "-o", str(tmp_path / "package"))
    assert ended.code == 0
    assert "without a head: config.json claims 1 MTP layer(s)" in ended.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--bits", "7"), "'--bits'"),
        (("--bits", "four"), "'--bits'"),
        (("--group", "48"), "'--group'"),
        (("--set", "lm_head"), "'--set'"),
        (("--set", "lm_head=7"), "'--set'"),
        (("--recipe", "2bit"), "'--recipe'"),
        (("--draft-vocabulary", "10"), "'--draft-vocabulary'"),
        (("--head", "2bit"), "'--head'"),
        (("--dtype", "float32"), "'--dtype'"),
    ],
)
def test_wrong_usage(light: Command, tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    ended = light("forge", "build", "reference", "-o", str(tmp_path / "package"), *flags)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert listing(tmp_path) == set()


@pytest.mark.parametrize("there", ["package", "package-fp16"])
def test_a_target_that_is_there_is_refused_before_anything_is_made(light: Command, tmp_path: Path, there: str) -> None:
    (tmp_path / there).mkdir()
    ended = light("forge", "build", "reference", "-o", str(tmp_path / "package"), "--fp16-sibling", *QUICK)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert f"{there} is there already" in ended.err
    assert listing(tmp_path) == {there}


def test_a_target_in_the_home_folder(light: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert light("forge", "build", "reference", "-o", "~/package", *QUICK).code == 0
    assert listing(tmp_path) == {"package"}


def test_ctrl_c_keeps_what_was_made(tmp_path: Path) -> None:
    package = tmp_path / "package"
    codes = []
    for how in ("interrupted", "whole"):
        done = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, how, str(package)], capture_output=True, text=True, check=False
        )
        codes.append(done.returncode)
        assert "Traceback" not in done.stderr
        assert listing(tmp_path) == ({".package.building"} if how == "interrupted" else {"package"})
    assert codes == [130, 0]


def test_a_pipe_sees_no_progress_and_a_terminal_a_bar(tmp_path: Path) -> None:
    arguments = ["forge", "build", "reference", *QUICK, "-o"]
    piped = subprocess.run([*COMMAND, *arguments, str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert piped.stderr.count("\n") == 1
    assert "weights" not in piped.stderr
    assert "\x1b" not in piped.stderr + piped.stdout
    terminal = pexpect.spawn(COMMAND[0], [*COMMAND[1:], *arguments, str(tmp_path / "b")], encoding="utf-8", timeout=120)
    terminal.expect("b: weights")
    terminal.expect("of 17 MB")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
