"""Guards what the documentation says of the command line: commands and flags exist, and every command is described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .command_line import every_command, every_flag, problem
from .pages import NEEDS, PAGES, ROOT, Block, blocks, commands, inline

HISTORY = ("docs/log.md",)  # tells of what was there at a time


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_and_flags_exist(page: Path) -> None:
    given = [(command.place, command.text) for block in blocks(page) for command in commands(block)]
    if named(page) not in HISTORY:
        given += [(named(page), text) for text in inline(page) if text.startswith("selfdraft ")]
    wrong = [f"{place}: {said}, in {text!r}" for place, text in given if (said := problem(text))]
    assert not wrong


@pytest.mark.parametrize("page", [page for page in PAGES if named(page) not in HISTORY], ids=named)
def test_flags_that_stand_alone_exist(page: Path) -> None:
    """In the text, as `--port`; other programs' are written behind the program's name."""
    known = every_flag()
    alone = {found[0] for text in inline(page) if (found := re.match(r"--[a-z][a-z0-9-]*(?=$|[ =])", text))}
    assert alone <= known


@pytest.mark.parametrize("name", [name for name, _ in every_command()])
def test_every_command_is_described(name: str) -> None:
    everything = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if named(page) not in HISTORY)
    assert re.search(rf"selfdraft {name}(?![\w-])", everything), f"no page says what `selfdraft {name}` is for"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_cannot_run_says_why(page: Path) -> None:
    needs = {(command.place, command.need) for block in blocks(page) for command in commands(block) if command.need}
    needs |= {(block.place, block.need) for block in blocks(page) if block.need}
    assert {need for _, need in needs} <= set(NEEDS), needs


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_blocks_say_what_they_are(page: Path) -> None:
    """Commands that stand in a block of another name would never run."""
    strange = {block.place for block in blocks(page) if block.language in ("bash", "shell", "zsh", "shellsession")}
    strange |= {
        block.place for block in blocks(page) if not block.language and re.search(r"^\$? ?selfdraft ", block.text, re.M)
    }
    assert not strange


def block(text: str, language: str = "sh") -> Block:
    return Block(ROOT / "README.md", language, 10, text)


def test_commands_are_found_with_their_comments() -> None:
    text = 'selfdraft run "a # b"  # said\n\n# a whole line\nselfdraft \\\n  serve  # here [needs a Mac]; there\n'
    found = commands(block(text))
    assert [(each.text, each.place, each.need, each.expected) for each in found] == [
        ('selfdraft run "a # b"', "README.md:11", "", None),
        ("selfdraft   serve", "README.md:15", "a Mac", None),
    ]


def test_a_command_of_several_lines_is_one() -> None:
    text = "printf 'a\\nb' |\n  cat  # both\necho \"x\ny\"\n"
    assert [each.text for each in commands(block(text))] == ["printf 'a\\nb' |\n  cat", 'echo "x\ny"']


def test_a_program_says_what_it_needs() -> None:
    assert block("import x\n# [needs that model]\n", "python").need == "that model"
    assert block("print('needs a Mac')\n", "python").need == ""


def test_what_a_command_prints_stands_below_it() -> None:
    found = commands(block("$ one\n1\n\n… 3\n$ two  # [needs root]\n", "console"))
    assert [(each.text, each.need, each.expected) for each in found] == [
        ("one", "", ["1", "", "… 3"]),
        ("two", "root", []),
    ]
    assert commands(block("selfdraft run", "python")) == []


def test_wrong_commands_are_named() -> None:
    assert problem("echo --wrong | selfdraft run --temperature 0.8") == ""
    assert problem("A=1 selfdraft run --tmperature 0.8") == "selfdraft run has no flag '--tmperature'"
    assert problem("echo 1 && .venv/bin/selfdraft forge brew x") == "selfdraft forge has no command 'brew'"
    assert problem("selfdraft forge build reference -o x --bits=4") == ""
    assert problem("selfdraft --version") == ""
