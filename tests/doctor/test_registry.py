"""Guards that the doctor ends with a report whatever breaks: a check, a module of it, MLX, or what it stands on."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from selfdraft.cli.settings import kinds
from selfdraft.doctor import context as contexts
from selfdraft.doctor import registry
from selfdraft.doctor.context import Context
from selfdraft.doctor.finding import Finding
from selfdraft.doctor.registry import check, findings

from .conftest import Examined, only


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checks but those that a test registers."""
    monkeypatch.setattr(registry, "_CHECKS", {})
    monkeypatch.setattr(registry, "KINDS", ())


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(checks: None) -> None:
    @check("first")
    def first(context: Context) -> Iterator[Finding]:
        yield Finding("first", "ok", "here")
        raise OSError("the disk\n  is gone")

    @check("second")
    def second(context: Context) -> Iterator[Finding]:
        yield Finding("second", "ok", "here")

    found = list(findings(Context(kinds)))
    assert [(each.name, each.status) for each in found] == [("first", "ok"), ("first", "fail"), ("second", "ok")]
    assert found[1].observed == "the check itself broke: OSError: the disk is gone"
    assert found[1].fix


def test_a_module_that_cannot_be_imported_is_a_finding(checks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KINDS", ("no_such_kind",))
    found = only(list(findings(Context(kinds))))
    assert (found.name, found.status) == ("no_such_kind", "fail")
    assert "ModuleNotFoundError" in found.observed


def test_without_mlx_what_needs_it_is_skipped(checks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_probed", lambda: "no such instruction")

    @check("with", needs_mlx=True)
    def with_mlx(context: Context) -> Iterator[Finding]:
        raise AssertionError("was run")

    assert only(list(findings(Context(kinds)))) == Finding("with", "skip", "MLX cannot be used")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ImportError('libmlx.so: no such symbol')", "ImportError: libmlx.so: no such symbol"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "by signal 4"),
        ("raise SystemExit(3)", "ends the process with code 3"),
        ("import time; time.sleep(60)", "did not answer within 2 s"),
        ("pass", ""),
    ],
)
def test_how_mlx_may_be_broken(monkeypatch: pytest.MonkeyPatch, examined: Examined, program: str, said: str) -> None:
    monkeypatch.setattr(contexts, "_PROBE", program)
    monkeypatch.setattr(contexts, "_PATIENCE", 2.0)
    problem = Context(kinds).mlx_problem
    assert said in problem
    assert bool(problem) == bool(said)
    found = only(examined("mlx runs", mlx_problem=problem))
    assert found.status == ("fail" if said else "ok")


@pytest.mark.parametrize("broken", ["mlx", "fastapi", "huggingface_hub", "psutil"])
def test_the_command_ends_with_a_report_where_a_package_is_broken(tmp_path: Path, broken: str) -> None:
    """A package of that name stands before the real one, and cannot be imported."""
    (tmp_path / broken).mkdir()
    (tmp_path / broken / "__init__.py").write_text("raise ImportError('made for another machine')\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # nobody has it for now
    path = f"{tmp_path}{os.pathsep}{Path.cwd()}"
    environment = {**os.environ, "PYTHONPATH": path, "SELFDRAFT_PORT": str(port)}
    command = [sys.executable, "-m", "selfdraft", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    found = {each["name"]: each for each in report["findings"]}
    if broken == "mlx":
        assert done.returncode == 1
        assert found["mlx runs"]["observed"].endswith("ImportError: made for another machine")
        assert {found[name]["status"] for name in ("device", "blas", "memory limit", "parity")} == {"skip"}
        assert found["port"]["status"] == "ok"
    assert found["python"]["status"] == "ok"


def test_json_has_no_word_for_what_is_no_number() -> None:
    figures = Finding("x", "ok", "y", figures={"error": math.nan, "gain": math.inf, "used": True}).to_dict()["figures"]
    assert json.loads(json.dumps(figures, allow_nan=False)) == {"error": "nan", "gain": "inf", "used": True}
