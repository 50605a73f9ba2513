"""Guards `selfdraft doctor` at the command line: exit codes, one JSON object, steady lines in a pipe."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from selfdraft.doctor import registry, report
from selfdraft.doctor.context import Context
from selfdraft.doctor.finding import Finding

from .conftest import Command

OK = Finding("one", "ok", "well")
SKIP = Finding("two", "skip", "not asked for", fix="ask for it")
WARN = Finding("three", "warn", "so so", "better", "do this")
FAIL = Finding("four", "fail", "bad", "good", "do that", {"x": 1})
MATRIX = Finding("parity float32", "ok", "0", figures={"product": [0.0, 0.25], "forward": [0.0, 0.0]})


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the checks find this."""

    def pretend(*findings: Finding) -> None:
        monkeypatch.setattr(report, "findings", lambda context: iter(findings))

    return pretend


def test_plain_lines(light: Command, found: Callable[..., None]) -> None:
    found(OK, SKIP, WARN, FAIL)
    ended = light("doctor")
    assert ended.code == 1
    assert ended.out.splitlines() == [
        "ok    one: well",
        "skip  two: not asked for",
        "      hint: ask for it",
        "warn  three: so so",
        "      expected: better",
        "      fix: do this",
        "fail  four: bad",
        "      expected: good",
        "      fix: do that",
        "1 ok, 1 warn, 1 fail, 1 skip",
    ]
    assert ended.err == ""


@pytest.mark.parametrize(("findings", "code"), [((), 0), ((OK, SKIP, WARN), 0), ((OK, FAIL), 1)])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_exit_code(
    light: Command, found: Callable[..., None], findings: tuple[Finding, ...], code: int, flags: list[str]
) -> None:
    found(*findings)
    assert light("doctor", *flags).code == code


def test_json(light: Command, found: Callable[..., None]) -> None:
    found(OK, FAIL)
    told = json.loads(light("doctor", "--json").out)
    assert told["schema_version"] == 1
    assert told["counts"] == {"ok": 1, "warn": 0, "fail": 1, "skip": 0}
    assert told["findings"][1] == {
        "name": "four",
        "status": "fail",
        "observed": "bad",
        "expected": "good",
        "fix": "do that",
        "figures": {"x": 1},
    }
    assert {"dtype", "server.port"} <= {each["name"] for each in told["settings"]}


def test_the_matrix(light: Command, found: Callable[..., None]) -> None:
    found(OK, MATRIX)
    lines = light("doctor", "--parity").out.splitlines()
    assert lines[3].split()[-2:] == ["1", "2"]
    assert lines[4].split() == ["float32,", "product", "0", "0.2"]


def test_a_table_on_a_terminal(light: Command, found: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    found(OK, SKIP, WARN, FAIL, MATRIX)
    monkeypatch.setattr("selfdraft.cli.doctor.is_fancy", lambda stream: True)
    text = light("doctor").out
    for word in ("well", "so so", "do this", "ask for it", "float32, product", "2 ok, 1 warn, 1 fail, 1 skip"):
        assert word in text


def test_order_and_names_are_steady(light: Command) -> None:
    """Twice the same, on the real checks; `fail` is nothing that this machine has."""
    one, two = (json.loads(light("doctor", "--json").out)["findings"] for _ in range(2))
    names = [each["name"] for each in one]
    assert names == [each["name"] for each in two]
    assert len(set(names)) == len(names)
    assert names[:4] == ["python", "system", "selfdraft", "mlx"]
    assert [each["name"] for each in one if each["status"] == "fail"] == []
    assert {"device", "memory limit", "session cache", "hub cache", "port", "fans", "parity"} <= set(names)
    assert not any(each["observed"].startswith("the check itself broke") for each in one)


def test_what_was_asked_for_reaches_the_checks(light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, bool]] = []

    def look(context: Context) -> Iterator[Finding]:
        asked.append((context.model, context.parity))
        yield OK

    monkeypatch.setattr(registry, "KINDS", ())
    monkeypatch.setattr(registry, "_CHECKS", {})
    registry.check("look")(look)
    light("doctor")
    light("doctor", "--parity", "-m", "reference")
    assert asked == [(None, False), ("reference", True)]


def test_a_bundle(light: Command, found: Callable[..., None], tmp_path: Path) -> None:
    found(OK, FAIL)
    path = tmp_path / "report.zip"
    ended = light("doctor", "--bundle", str(path))
    assert ended.code == 1  # the report's, as without
    assert f"{path} holds report.json" in " ".join(ended.err.split())
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read("report.json"))["counts"]["fail"] == 1
    before = path.read_bytes()
    ended = light("doctor", "--bundle", str(path))
    assert ended.code == 1
    assert "exists, and is left as it is" in " ".join(ended.err.split())
    assert path.read_bytes() == before
    ended = light("doctor", "--bundle", str(tmp_path / "no" / "x.zip"))
    assert (ended.code, "Traceback" in ended.err) == (1, False)
    ended = light("doctor", "--log", str(path))
    assert ended.code == 2
    assert "'--log'" in ended.err
