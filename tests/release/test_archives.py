"""Guards what is published: an archive holds the package and nothing else, and a build can be repeated to the byte."""

from __future__ import annotations

import email
import io
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import selfdraft

from .conftest import ROOT, Built

archives = pytest.importorskip("archives")

NEEDED = (
    "assets/reference/model.safetensors",
    "kernels/source/threefry.h",
    "server/page/static/index.html",
    "py.typed",
)


def metadata(built: Built) -> email.message.Message:
    with zipfile.ZipFile(built.wheel) as wheel:
        text = wheel.read(f"selfdraft-{selfdraft.__version__}.dist-info/METADATA").decode()
    return email.message_from_string(text)


def test_both_hold_what_they_must(built: Built) -> None:
    """`make dist` refuses others itself; here it is seen that what it compares with is not empty."""
    for expected in (archives.expected_wheel(), archives.expected_sdist()):
        for name in NEEDED:
            assert any(each.endswith(f"selfdraft/{name}") for each in expected)
        assert any(each.endswith("share/man/man1/selfdraft.1") for each in expected)
        assert any(each.endswith("LICENSE") for each in expected)
        assert not any(part in each for each in expected for part in ("tests/", "tools/", "benchmarks/", "__pycache__"))
    assert archives.problems(built.wheel, archives.expected_wheel()) == []
    assert archives.problems(built.sdist, archives.expected_sdist()) == []


def test_a_build_repeats_to_the_byte_and_the_sdist_gives_the_same_wheel(
    built: Built, packaging_python: Path, tmp_path: Path
) -> None:
    """Once more, at another place in time and with another umask, and the wheel straight from the tree."""
    folder = tmp_path / "again"
    epoch = subprocess.run(
        ["git", "log", "-1", "--format=%ct", "--", *archives.SOURCES],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    subprocess.run(
        [packaging_python, "-m", "hatchling", "build", "--directory", folder],
        cwd=ROOT,
        env={**os.environ, "SOURCE_DATE_EPOCH": epoch, "TZ": "America/Lima"},
        umask=0o077,
        capture_output=True,
        timeout=300,
        check=True,
    )
    for archive in (built.wheel, built.sdist):
        assert (folder / archive.name).read_bytes() == archive.read_bytes(), archive.name


def test_the_metadata_is_complete(built: Built) -> None:
    found = metadata(built)
    assert found["Version"] == selfdraft.__version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert found["Keywords"]
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert {"cpu", "cuda13", "test", "check"} <= set(found.get_all("Provides-Extra", []))
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_command_is_the_one_entry_point(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        text = wheel.read(f"selfdraft-{selfdraft.__version__}.dist-info/entry_points.txt").decode()
    assert text.split() == ["[console_scripts]", "selfdraft", "=", "selfdraft.cli.app:main"]


def wheel_of(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, "")
    return path


def test_what_is_wrong_with_an_archive_is_said(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path / "a.whl", "selfdraft/a.py", "tests/b.py", "../c")
    found = archives.problems(wheel, {"selfdraft/a.py", "selfdraft/d.py", "../c"})
    assert found == [
        "a.whl lacks selfdraft/d.py",
        "a.whl should not hold tests/b.py",
        "a.whl: ../c leads out of it",
    ]
    sdist = tmp_path / "a.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("top/a.py"), io.BytesIO())
    assert archives.problems(sdist, {"top/a.py"}) == []
    assert archives.problems(sdist, set()) == ["a.tar.gz should not hold top/a.py"]


def test_an_archive_may_not_be_larger_than_the_index_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = wheel_of(tmp_path / "a.whl", "a")
    monkeypatch.setattr(archives, "LARGEST", 10)
    (line,) = archives.problems(wheel, {"a"})
    assert "more than the 10" in line
