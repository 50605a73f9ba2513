"""Guards completion: real shells, with the script that `selfdraft completions` prints, complete commands, options,
values, models and file names. No Python is started for it: the program on the path in these tests prints its words."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pexpect
import pytest

from selfdraft.cli.app import app
from selfdraft.cli.command_tree import Command, command_tree
from selfdraft.cli.completions import completion_script
from tests.support.needs import lacking

from .conftest import Command as Call

SHELLS = ("bash", "zsh", "fish")
PROMPT = "READY> "

# What is typed before Tab, and what its last word becomes.
LINES = {
    "a command": ("conn", "connect"),
    "a command of a group": ("forge b", "build"),
    "a choice": ("connect clau", "claude-code"),
    "an option": ("serve --api", "--api-key-file"),
    "an option of a command of a group": ("forge build --fp", "--fp16-sibling"),
    "the choices of an option": ("serve --mode sus", "sustained"),
    "those behind =": ("serve --mode=sus", "--mode=sustained"),
    "a model, behind a short option": ("chat -m ref", "reference"),
    "a model": ("inspect ref", "reference"),
    "a file": ("serve --log-file serv", "server.log"),
    "a folder with a space": ("forge verify my", "my model"),
    "nothing, where anything may stand": ("run --system serv", "serv"),
    "nothing, where nothing may stand": ("models ref", "ref"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file, a folder and a program named selfdraft."""
    found = tmp_path_factory.mktemp("home")
    (found / "server.log").touch()
    (found / "my model").mkdir()
    (found / "bin").mkdir()
    program = found / "bin" / "selfdraft"
    program.write_text('#!/bin/sh\necho "<$*>"\n')
    program.chmod(0o755)
    for shell in SHELLS:
        (found / "bin" / f"_selfdraft.{shell}").write_text(completion_script(shell), encoding="utf-8")
    shutil.copy(found / "bin" / "_selfdraft.zsh", found / "bin" / "_selfdraft")
    return found


def opened(shell: str, home: Path) -> pexpect.spawn:
    """An interactive shell, ready, that completes."""
    if shutil.which(shell) is None:
        lacking(f"there is no {shell}")
    options, setup = {
        "bash": (["--norc", "--noprofile"], f"PS1='{PROMPT}'; source bin/_selfdraft.bash"),
        "zsh": (["-f"], f"PS1='{PROMPT}'; fpath=($PWD/bin $fpath); autoload -Uz compinit; compinit -u -D"),
    }[shell]
    environment = {**os.environ, "TERM": "dumb", "HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}"}
    spawned = pexpect.spawn(
        shell, [*options, "-i"], env=environment, cwd=str(home), encoding="utf-8", timeout=30, dimensions=(50, 200)
    )
    spawned.sendline(f"{setup}; echo set up")
    spawned.expect(r"\nset up\r")
    spawned.expect_exact(PROMPT)
    return spawned


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes(shell: str, home: Path) -> None:
    spawned = opened(shell, home)
    try:
        for what, (typed, word) in LINES.items():
            spawned.send(f"selfdraft {typed}\t\r")
            spawned.expect(r"<([^<>\r\n]*)>\r")
            assert spawned.match[1].rstrip("/=") == " ".join([*typed.split()[:-1], word]), what
    finally:
        spawned.close(force=True)


def test_fish_completes(home: Path) -> None:
    """fish completes without a terminal, if it is asked to."""
    if shutil.which("fish") is None:
        lacking("there is no fish")
    for what, (typed, word) in LINES.items():
        offered = fish(home, f"selfdraft {typed}") or [typed.split()[-1]]
        assert [each.rstrip("/") for each in offered] == [word], what


def fish(home: Path, line: str) -> list[str]:
    """What fish offers for a line."""
    script = f"source bin/_selfdraft.fish; complete --do-complete {line!r}"
    environment = {**os.environ, "HOME": str(home)}
    done = subprocess.run(
        ["fish", "--no-config", "--command", script], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.stderr == ""
    return [each.split("\t")[0] for each in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def tree() -> Command:
    return command_tree(app)


@pytest.mark.parametrize("shell", SHELLS)
def test_everything_is_offered(shell: str, tree: Command) -> None:
    script = completion_script(shell)
    for command in tree.walk():
        assert command.path[-1] in script
        for option in command.options:
            for name in option.names:
                assert re.search(rf"{re.escape(name.lstrip('-'))}\b", script), name
            for choice in option.value.choices if option.value else ():
                assert re.search(rf"\b{re.escape(choice)}\b", script), choice


def test_a_zsh_function_stands_for_one_command(tree: Command) -> None:
    """A helper was once called as the function of `selfdraft models` is: whichever came last won."""
    names = re.findall(r"^(\w+)\(\)", completion_script("zsh"), re.MULTILINE)
    assert len(names) == len(set(names)) == 1 + len(list(tree.walk()))


def test_the_tree_knows_what_values_may_be(tree: Command) -> None:
    options = {
        (*command.path[1:], name): option
        for command in tree.walk()
        for option in command.options
        for name in option.names
    }
    kinds = {
        ("serve", "--model"): "model",
        ("serve", "--log-file"): "file",
        ("forge", "build", "-o"): "folder",
        ("serve", "--mode"): "choice",
        ("run", "--stop"): "text",
    }
    arguments = {command.path[1:]: command.arguments for command in tree.walk()}
    assert [arguments[("inspect",)][0].value.kind, arguments[("pull",)][0].value.kind] == ["model", "text"]
    for path, kind in kinds.items():
        value = options[path].value
        assert value is not None
        assert value.kind == kind, path
    assert options["serve", "--strict-model"].value is None
    assert options["run", "--stop"].repeatable
    assert options["serve", "-h"].names == ("--help", "-h")


def test_the_command_prints_the_script(light: Call) -> None:
    for shell in SHELLS:
        assert light("completions", shell).out == completion_script(shell)


@pytest.mark.parametrize("arguments", [[], ["tcsh"]])
def test_other_shells_are_wrong_usage(light: Call, arguments: list[str]) -> None:
    ended = light("completions", *arguments)
    assert ended.code == 2
    assert "SHELL" in ended.err
    assert ended.out == ""
