"""Guards the one configuration object: who wins, what settings.toml may say, and how it is written."""

from __future__ import annotations

import dataclasses
import os
import stat
from pathlib import Path

import psutil
import pytest

from selfdraft.cli.serve import ServeFlags
from selfdraft.errors import InvalidRequest, SelfdraftError
from selfdraft.server import instance as instances
from selfdraft.server.config import ServerSettings, load_server_settings
from selfdraft.server.instance import Instance, find, local_url, noted, stop
from selfdraft.settings import Settings, load_settings, remember, settings_path


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """settings.toml of this test; not there yet."""
    monkeypatch.setenv("SELFDRAFT_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("SELFDRAFT_BLAS", raising=False)
    return tmp_path / "settings.toml"


def test_tests_cannot_touch_the_settings_of_a_user() -> None:
    assert settings_path() == Path("/dev/null/selfdraft/settings.toml")
    assert load_settings().dtype == "auto"
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        remember("start", {"model": "reference"})


def test_arguments_beat_the_environment_beats_the_file_beats_defaults(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_server_settings().port == 8000
    stored.write_text('dtype = "float16"\n[server]\nport = 8001\nalias = ["a", "b"]\n')
    found = load_server_settings()
    assert (found.port, found.alias, found.dtype, found.rows) == (8001, ("a", "b"), "float16", 16)
    assert load_settings().dtype == "float16"
    monkeypatch.setenv("SELFDRAFT_PORT", "8002")
    monkeypatch.setenv("SELFDRAFT_DTYPE", "bfloat16")
    assert load_server_settings().port == 8002
    assert load_settings().dtype == "bfloat16"
    assert load_server_settings(port=8003).port == 8003
    assert load_settings(dtype="float32").dtype == "float32"


WRONG = [
    ('dtype = "int8"', ["dtype", "'int8'", "float16", "Correct that line"]),
    ('dtyp = "auto"', ["dtyp = 'auto' is no setting", "prefill_chunk", "[server]", "Correct or delete"]),
    ('dtype =\nblas = "auto"', ["cannot be read as TOML", "line 1", "correct it"]),
    ("[engine]\nx = 1", ["engine", "is no setting"]),
    ("[server]\nport = 70000", ["port", "70000", "65535", "Correct that line"]),
    ('[server]\nport = "x"', ["port", "'x'", "Correct that line"]),
    ("[server]\nprot = 1", ["[server] prot = 1 is no setting", "port", "max_depth"]),
    ('[server]\ndtype = "float16"', ["[server] dtype = 'float16' is no setting"]),
    ('[server]\napi_key = "0123456789abcdef"', ["api_key is not read from this file", "SELFDRAFT_API_KEY"]),
    ("server = 3", ["write [server] above"]),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_is_wrong_in_the_file_is_named(stored: Path, text: str, said: list[str]) -> None:
    stored.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        load_server_settings()
    for each in (str(stored), *said):
        assert each in str(refused.value)
    assert "0123456789abcdef" not in str(refused.value)


def test_a_wrong_line_about_the_server_does_not_stop_the_engine(stored: Path) -> None:
    stored.write_text('dtype = "float16"\n[server]\nprot = 1\n[start]\nmodl = 1\n')
    assert load_settings().dtype == "float16"


def test_the_file_is_blamed_only_for_its_own(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.write_text("[server]\nport = 70000\n")
    monkeypatch.setenv("selfdraft_port", "x")  # names of the environment may be written in any case
    with pytest.raises(InvalidRequest, match="SELFDRAFT_PORT") as refused:
        load_server_settings()
    assert str(stored) not in str(refused.value)
    with pytest.raises(InvalidRequest, match="70001") as refused:
        load_server_settings(port=70001)
    assert str(stored) not in str(refused.value)


def test_a_file_of_others_cannot_be_read_is_said(stored: Path) -> None:
    stored.mkdir()
    with pytest.raises(InvalidRequest, match="cannot be read as TOML"):
        load_settings()


def test_remembering_makes_a_private_file(stored: Path) -> None:
    assert remember("start", {"model": "reference"}) == stored
    assert stat.S_IMODE(stored.stat().st_mode) == 0o600
    assert '[start]\nmodel = "reference"\n' in stored.read_text()
    assert [path.name for path in stored.parent.iterdir()] == ["settings.toml"]


def test_remembering_keeps_what_else_is_there(stored: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere.toml"
    real.write_text('# mine\ndtype = "float16"  # why\n\n[start]\nmodel = "old"  # once\nsurface = "browser"\n')
    real.chmod(0o640)
    stored.symlink_to(real)
    remember("start", {"model": "new", "drafting": "off"})
    text = real.read_text()
    assert text.startswith('# mine\ndtype = "float16"  # why\n')
    assert 'model = "new"' in text
    assert '[start]\ndrafting = "off"\nmodel = "new"  # once\nsurface = "browser"\n' in text
    assert stored.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_write_that_fails_changes_nothing(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.write_text('dtype = "float16"\n')

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        remember("start", {"model": "new"})
    assert stored.read_text() == 'dtype = "float16"\n'
    assert [path.name for path in stored.parent.iterdir()] == ["settings.toml"]
    stored.write_text("dtype =")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        remember("start", {"model": "new"})


def test_every_setting_of_the_server_has_a_flag() -> None:
    flags = {field.name for field in dataclasses.fields(ServeFlags)}
    assert flags == set(ServerSettings.model_fields) - set(Settings.model_fields) - {"api_key"}


# The note of a server that runs


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The note's path."""
    path = tmp_path / "state" / "server.json"
    monkeypatch.setattr(instances, "_path", lambda: path)
    return path


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
    ],
)
def test_a_url_that_this_machine_reaches(host: str, url: str) -> None:
    assert local_url(host, 80) == url
    assert load_server_settings(host=host, port=80).url == url


def test_a_note_lives_as_long_as_its_server(state: Path) -> None:
    assert find() is None
    with noted("127.0.0.1", 8000, "reference") as instance:
        assert find() == instance
        assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert find() is None
    assert not state.exists()


def test_of_two_servers_the_newer_is_noted_and_then_the_older(state: Path) -> None:
    with noted("127.0.0.1", 8000, "older") as older:
        with noted("127.0.0.1", 8001, "newer") as newer:
            assert find() == newer
        assert find() == older
    assert find() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 1}', "null"])
def test_a_broken_or_stale_note_is_removed(state: Path, text: str) -> None:
    state.parent.mkdir()
    state.write_text(text)
    assert find() is None
    assert not state.exists()


def test_a_process_that_took_the_number_over_is_not_the_server(state: Path) -> None:
    me = psutil.Process()
    assert Instance(me.pid, me.create_time(), "127.0.0.1", 1, "x").alive
    assert not Instance(me.pid, me.create_time() - 60, "127.0.0.1", 1, "x").alive


def test_the_server_of_another_user_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", forbidden)
    with pytest.raises(SelfdraftError, match=r"process 7\) is another user's: stop it as that user"):
        stop(Instance(7, 0, "127.0.0.1", 1, "x"), 1)
