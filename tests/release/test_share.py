"""Guards that the man page and completions in packaging/share are those of this command line, and are well formed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from selfdraft.cli.app import app
from selfdraft.cli.command_tree import command_tree
from selfdraft.cli.settings import kinds
from selfdraft.settings_list import list_settings
from tests.support.needs import lacking

from .conftest import ROOT, TOOLS

share = pytest.importorskip("share")

PAGE = share.SHARE / share.MAN


def test_they_are_of_this_command_line() -> None:
    done = subprocess.run([sys.executable, TOOLS / "share.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_one_is_named(tmp_path: Path) -> None:
    """In a copy of the project, where a flag was taken out of a script."""
    copy = tmp_path / "project"
    shutil.copytree(share.SHARE, copy / "packaging" / "share")
    shutil.copytree(TOOLS, copy / "tools" / "release")
    (copy / "selfdraft").symlink_to(ROOT / "selfdraft")
    script = copy / "packaging" / "share" / share.COMPLETIONS["zsh"]
    script.write_text(script.read_text(encoding="utf-8").replace("--log-file", "--log"), encoding="utf-8")
    command = [sys.executable, copy / "tools" / "release" / "share.py"]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 1), done.stderr
    assert "_selfdraft" in done.stdout
    assert "make share" in done.stdout
    subprocess.run(command, capture_output=True, check=True)
    assert script.read_bytes() == (share.SHARE / share.COMPLETIONS["zsh"]).read_bytes()
    assert (copy / "packaging" / "share" / share.MAN).read_bytes() == PAGE.read_bytes()  # its date did not move


def test_the_page_has_no_faults() -> None:
    if shutil.which("mandoc") is None:
        lacking("there is no mandoc")
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "style", PAGE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_page_reads_as_it_should(tmp_path: Path) -> None:
    if shutil.which("mandoc") is None:
        lacking("there is no mandoc")
    shown = subprocess.run(["mandoc", "-T", "utf8", PAGE], capture_output=True, text=True, check=True).stdout
    text = subprocess.run(["col", "-b"], input=shown, capture_output=True, text=True, check=True).stdout
    for command in command_tree(app).walk():
        if not command.commands:
            assert f"   {' '.join(command.path)} [options]" in text
        for option in command.options:
            assert option.names[0] in text
    for setting in list_settings(kinds()):
        assert setting.variable in text
    assert "selfdraft - exact speculative decoding with a model's own" in " ".join(text.split())
    assert 'selfdraft run "What is the capital of Japan?"' in text
    assert "\\" not in text  # an escape that was not one
