"""Guards the commands of the documentation: each one runs as it stands, and prints what is shown below it.

All of a page in one sandbox, in order, with the bundled model. Those that need what no test has say so on the page
(`[needs ...]`); that they exist is asked in `test_words`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.support.checkpoints import add_text_side
from tests.support.hub import fake_hub, files_of
from tests.support.nano import nano_model, write_checkpoint
from tests.support.retrieval import FIXTURES
from tests.support.vision import pictured, write_sighted

from .pages import PAGES, ROOT, Block, blocks, commands
from .sandbox import Sandbox, serves, shown_otherwise

MODELS = ("Qwen/Qwen3.5-4B",)  # that pages pull: random ones answer to these names
EMBEDDERS = ("sentence-transformers/all-MiniLM-L6-v2",)
SIGHTED = "Qwen/Qwen3.5-0.8B"  # and one with a vision tower


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = {"vocab_size": 8192}
    folder = write_checkpoint(tmp_path_factory.mktemp("hub"), nano_model(**config), config=config)
    files = files_of(add_text_side(folder))
    with fake_hub() as found:
        for name in MODELS:
            found.put(name, files)
        for name in EMBEDDERS:
            found.put(name, files_of(FIXTURES / "bert"))
        found.put(SIGHTED, files_of(write_sighted(tmp_path_factory.mktemp("sighted"))))
        yield found.url


@pytest.fixture
def sandbox(tmp_path: Path, hub: str) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path, hub)
    Image.fromarray(pictured().rgb).save(tmp_path / "work" / "cat.png")  # that pages show to it
    yield made
    made.stop()


def run(block: Block, sandbox: Sandbox) -> list[str]:
    """What went wrong in a block."""
    wrong = []
    if block.language == "python" and not block.need:
        ran = sandbox.python(block.text)
        wrong += [f"{block.place}: exit code {ran.code}\n{ran.output}"] if ran.code else []
    for command in commands(block):
        if command.need:
            continue
        ran = sandbox.run(command.text)
        if ran.code:
            wrong.append(f"{command.place}: {command.text}: exit code {ran.code}\n{ran.output}")
        elif command.expected and (said := shown_otherwise(ran.output, command.expected)):
            wrong.append(f"{command.place}: {command.text}: {said}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_runs(page: Path, sandbox: Sandbox) -> None:
    wrong = [each for block in blocks(page) for each in run(block, sandbox)]
    assert not wrong, "\n\n".join(wrong)


def block(text: str, language: str = "sh") -> Block:
    return Block(ROOT / "README.md", language, 1, text)


def test_a_command_that_fails_is_told(sandbox: Sandbox) -> None:
    wrong = run(block("false\ntrue\nexit 3 # [needs root]\nselfdraft run --nonsense\n"), sandbox)
    assert [each.split(": exit")[0] for each in wrong] == [
        "README.md:2: false",
        "README.md:5: selfdraft run --nonsense",
    ]


def test_other_output_than_shown_is_told(sandbox: Sandbox) -> None:
    assert run(block("$ printf 'a\\nb 1 c\\n'\na\nb … c\n$ echo x\n…\n$ true\n", "console"), sandbox) == []
    (wrong,) = run(block("$ printf 'a\\nb\\n'\na\nc\n", "console"), sandbox)
    assert "the page shows\na\nc\nand it printed\na\nb\n" in wrong


@pytest.mark.parametrize(
    ("output", "expected", "fits"),
    [
        ("a\nb\nc\n", ["a", "…", "c"], True),
        ("a\nc", ["a", "…", "c"], True),
        ("a\nb", ["a"], False),
        ("a.c", ["a…"], True),
        ("abc", ["a.c"], False),
        ("b\n", ["a"], False),
    ],
)
def test_dots_stand_for_anything(output: str, expected: list[str], fits: bool) -> None:
    assert (shown_otherwise(output, expected) == "") is fits


def test_a_program_that_fails_is_told(sandbox: Sandbox) -> None:
    assert "exit code 1" in run(block("raise SystemExit(1)", "python"), sandbox)[0]


def test_what_serves() -> None:
    assert serves("selfdraft serve")
    assert serves("A=1 selfdraft serve --port 9000")
    assert serves("selfdraft start --browser")
    assert not serves("selfdraft serve --help")
    assert not serves("selfdraft start")


def test_the_sandbox_is_nobodys_home(sandbox: Sandbox) -> None:
    assert sandbox.run("echo $HOME; pwd; selfdraft settings get; make start").code == 0
    assert set(sandbox.environment).isdisjoint({"XDG_CONFIG_HOME", "SELFDRAFT_CONFIG_DIR"})
    assert sandbox.environment["PATH"].startswith(str(sandbox.folder))
    assert sys.executable in (sandbox.folder / "bin" / "selfdraft").read_text()


def test_ports_are_others_and_shown_as_they_are_written(sandbox: Sandbox) -> None:
    ran = sandbox.run("echo http://127.0.0.1:8000 $SELFDRAFT_PORT")
    assert ran.output.splitlines()[0] == "http://127.0.0.1:8000 8000"  # as the page has it
    assert sandbox.ports["8000"] == sandbox.environment["SELFDRAFT_PORT"] != "8000"
