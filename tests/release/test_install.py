"""Guards that what is published works where nothing but Python was: the wheel as users install it, and the sdist on top
of the pinned set, whose hashes pip compares. Both answer, serve and end, from another folder than the checkout."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import selfdraft

from .conftest import ROOT, Built

LOCK = ROOT / "packaging" / "locks" / "linux-cpu.txt"
QUESTION = "What is the capital of Japan?"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the extra cpu is for Linux")


class Installed:
    """A fresh environment with the package in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.elsewhere = folder / "elsewhere"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SELFDRAFT_", "PYTHON"))},
            **{"HOME": str(self.elsewhere), "SELFDRAFT_CONFIG_DIR": str(self.elsewhere), "HF_HUB_OFFLINE": "1"},
            "XDG_CACHE_HOME": str(self.elsewhere / "cache"),
        }
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.elsewhere.mkdir()

    def pip(self, *arguments: str | Path) -> None:
        """pip, with the cache of whoever runs the tests."""
        command = [self.folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, cwd=self.elsewhere, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr

    def command(self, *arguments: str) -> list[str]:
        return [str(self.folder / "bin" / "selfdraft"), *arguments]

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.elsewhere, env=self.environment, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def is_the_installed_one(installed: Installed) -> None:
    assert installed.run("--version").splitlines()[0] == f"selfdraft {selfdraft.__version__}"
    command = [installed.folder / "bin" / "python", "-c", "import selfdraft; print(selfdraft.__file__)"]
    done = subprocess.run(command, cwd=installed.elsewhere, env=installed.environment, capture_output=True, text=True)
    assert Path(done.stdout.strip()).is_relative_to(installed.folder)


def answers(installed: Installed) -> None:
    assert "Tokyo" in installed.run("run", "--max-tokens", "32", "--temperature", "0", QUESTION)
    assert "reference" in installed.run("inspect", "reference")


def has_its_manual_and_completions(installed: Installed) -> None:
    share = installed.folder / "share"
    assert f"selfdraft {selfdraft.__version__}" in (share / "man/man1/selfdraft.1").read_text(encoding="utf-8")
    for shell, name in (("bash", "bash-completion/completions/selfdraft"), ("zsh", "zsh/site-functions/_selfdraft")):
        assert (share / name).read_text(encoding="utf-8") == installed.run("completions", shell)


@contextlib.contextmanager
def serving(installed: Installed) -> Iterator[str]:
    """A server of the bundled model on a free port, once it is loaded; its URL."""
    with subprocess.Popen(
        installed.command("serve", "--port", "0"),
        cwd=installed.elsewhere, env=installed.environment, stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            assert server.stderr is not None
            url = next(found[0] for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            wait_until_loaded(url)
            yield url
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
            assert server.returncode == 0
        finally:
            server.kill()


def wait_until_loaded(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(f"{url}/health", timeout=60):
            return
        time.sleep(0.2)
    raise AssertionError("the model was not loaded in time")


def serves(installed: Installed) -> None:
    with serving(installed) as url:
        with urllib.request.urlopen(url, timeout=60) as page:
            assert b"<html" in page.read()
        asked = {"model": "reference", "max_tokens": 32, "messages": [{"role": "user", "content": QUESTION}]}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert "Tokyo" in json.load(answer)["choices"][0]["message"]["content"]


def from_wheel(built: Built, folder: Path) -> Installed:
    """As docs/install.md says."""
    found = Installed(folder)
    found.pip("install", "--quiet", "--no-compile", f"{built.wheel}[cpu]")
    return found


def from_sdist(built: Built, folder: Path) -> Installed:
    """On the pinned set."""
    found = Installed(folder)
    found.pip("install", "--quiet", "--no-compile", "--require-hashes", "-r", LOCK)
    found.pip("install", "--quiet", "--no-compile", "--no-deps", built.sdist)
    return found


@pytest.mark.parametrize("install", [from_wheel, from_sdist])
def test_it_works(install: Callable[[Built, Path], Installed], built: Built, tmp_path: Path) -> None:
    """One test for each way: an environment takes a minute, and workers share none."""
    installed = install(built, tmp_path / "environment")
    installed.pip("check")
    is_the_installed_one(installed)
    answers(installed)
    has_its_manual_and_completions(installed)
    serves(installed)
