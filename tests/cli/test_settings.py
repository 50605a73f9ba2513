"""Guards `selfdraft settings`: every setting is listed with where it comes from, only what is valid is written, in the
right place, and nothing else of the file changes; secrets are never shown.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from selfdraft.cli.places import ModelSettings
from selfdraft.cli.settings import kinds
from selfdraft.cli.wizard import StartSettings
from selfdraft.server.config import ServerSettings, load_server_settings
from selfdraft.settings import TABLES, Settings, load_settings, remember
from selfdraft.settings_list import list_settings, unknown_variables
from selfdraft.tray.choices import TraySettings

from .conftest import Command

KEY = "0123456789abcdef-secret"
FILE = """# mine, by hand

# numbers
dtype = "float16"  # why

# about the server
[server]
port = 8001  # once

# about start
[start]
model = "old"
"""


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """settings.toml of this test; not there yet."""
    monkeypatch.setenv("SELFDRAFT_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("SELFDRAFT_BLAS", raising=False)
    return tmp_path / "settings.toml"


def test_every_table_of_the_file_is_known() -> None:
    assert {table for kind in kinds() for table in kind.tables if table} == set(TABLES)


def test_folders_of_models_are_written_as_a_list(light: Command, stored: Path) -> None:
    assert light("settings", "set", "model_folders", "/a:/b").code == 0
    assert tomllib.loads(stored.read_text()) == {"models": {"model_folders": ["/a", "/b"]}}
    assert listed(light, "model_folders")["models.model_folders"]["value"] == ["/a", "/b"]


def listed(light: Command, *names: str) -> dict[str, dict[str, Any]]:
    ended = light("settings", "get", *names, "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["schema_version"] == 1
    return {each["name"]: each for each in report["settings"]}


def test_every_setting_is_listed_once_with_its_meaning(light: Command, stored: Path) -> None:
    found = listed(light)
    server = ServerSettings.model_fields.keys() - Settings.model_fields.keys()
    start = {f"start.{name}" for name in StartSettings.model_fields}
    models = {f"models.{name}" for name in ModelSettings.model_fields}
    tray = {f"tray.{name}" for name in TraySettings.model_fields}
    assert found.keys() == {*Settings.model_fields, *(f"server.{name}" for name in server), *start, *models, *tray}
    for name, each in found.items():
        assert len(each["meaning"]) > 8, f"the docstring of its class says nothing of {name}"
        assert each["variable"].startswith("SELFDRAFT_")


def test_where_a_value_comes_from(light: Command, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.write_text(FILE + "\n")
    monkeypatch.setenv("selfdraft_rows", "3")
    monkeypatch.setenv("SELFDRAFT_QUEUE", "")
    monkeypatch.setenv("SELFDRAFT_PORT", "8002")
    found = listed(light)
    origins = {name: (found[name]["value"], found[name]["origin"]) for name in found}
    assert origins["dtype"] == ("float16", "settings.toml")
    assert origins["server.port"] == (8002, "environment")
    assert origins["server.rows"] == (3, "environment")
    assert origins["server.queue"] == (64, "default")
    assert origins["start.model"] == ("old", "settings.toml")
    assert list(listed(light, "port")) == list(listed(light, "server.port")) == ["server.port"]
    ended = light("settings", "get", "port")
    assert ended.out.startswith("server.port = 8002 (environment)\n    port on which it listens")


def test_secrets_are_masked(light: Command, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFDRAFT_API_KEY", KEY)
    for ended in (light("settings", "get"), light("settings", "get", "--json"), light("settings", "get", "api_key")):
        assert KEY not in ended.out + ended.err
        assert "*****" in ended.out
    stored.write_text(f'[server]\napi_key = "{KEY}"\n')
    ended = light("settings", "get")
    assert ended.code == 1
    assert KEY not in ended.out + ended.err


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("dtype", "float32", 'dtype = "float32"  # why\n'),
        ("server.port", "9000", "[server]\nport = 9000  # once\n"),
        ("rows", "3", "# about the server\n[server]\nrows = 3\nport"),
        ("strict-model", "yes", "[server]\nstrict_model = true\n"),
        ("alias", "a, b", '[server]\nalias = ["a", "b"]\n'),
        ("memory_limit", "12GiB", '# mine, by hand\n\nmemory_limit = "12GiB"\n# numbers\n'),
        ("memory_limit", "5000000000", "memory_limit = 5000000000\n"),
        ("keepalive", "1.5", "keepalive = 1.5\n"),
        ("ssd_session_cache_dir", "~/there", 'ssd_session_cache_dir = "~/there"\n'),
        ("start.model", 'a "b"\\c', 'model = "a \\"b\\"\\\\c"\n'),
    ],
)
def test_a_value_is_written_where_it_belongs(light: Command, stored: Path, name: str, text: str, line: str) -> None:
    stored.write_text(FILE)
    ended = light("settings", "set", name, text)
    assert ended.code == 0, ended.err
    assert str(stored) in ended.out
    after = stored.read_text()
    assert line in after
    kept = [each.strip() for each in FILE.splitlines() if each.strip()]
    lost = [each for each in kept if each not in [now.strip() for now in after.splitlines()]]
    assert len(lost) <= 1
    assert all(
        comment in after for comment in ("# mine, by hand", "# why", "# once", "# about the server", "# about start")
    )
    own = name.rpartition(".")[2].replace("-", "_")
    assert listed(light, own)[next(iter(listed(light, own)))]["origin"] == "settings.toml"


def test_a_new_file(light: Command, stored: Path) -> None:
    assert light("settings", "set", "port", "8001").code == 0
    assert light("settings", "set", "dtype", "float16").code == 0
    text = stored.read_text()
    assert text.startswith("# Settings of Selfdraft.")
    assert text.endswith('\n\ndtype = "float16"\n\n[server]\nport = 8001\n')
    assert load_server_settings().port == 8001
    assert load_settings().dtype == "float16"


@pytest.mark.parametrize(
    "text",
    [
        "server = {port = 1}\n",
        "server.port = 1\n",
        '"server" = {port = 1}\n',
        "[ server ]\nport = 1\n",
        "x = 1\n",
        'x = """\n[server]\n"""\n[server]\nport = 1\n',
    ],
)
def test_tables_in_other_forms(stored: Path, text: str) -> None:
    stored.write_text(text)
    before = tomllib.loads(text)
    remember("server", {"rows": 2, "queue": 3})
    assert tomllib.loads(stored.read_text()) == {
        **before,
        "server": {**before.get("server", {}), "rows": 2, "queue": 3},
    }
    remember("", {"dtype": "float16"})
    assert tomllib.loads(stored.read_text())["dtype"] == "float16"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("port", "70000", ["port", "70000", "65535"]),
        ("port", "x", ["port", "'x'"]),
        ("dtype", "int8", ["dtype", "'int8'", "float16"]),
        ("memory_limit", "much", ["memory_limit", "'much'", "4GiB"]),
        ("memory_limit", "0", ["memory_limit", "'0'"]),
        ("cors_origin", "*", ["cors_origin", "no origin"]),
        ("prot", "1", ["no setting 'prot'; did you mean port?"]),
        ("server.prot", "1", ["no setting 'server.prot'; did you mean server.port?"]),
        ("qqqqqq", "1", ["no setting 'qqqqqq'; `selfdraft settings get` lists all"]),
        ("api_key", KEY, ["api_key is not kept in settings.toml: set SELFDRAFT_API_KEY"]),
    ],
)
def test_what_is_wrong_is_not_written(light: Command, stored: Path, name: str, value: str, said: list[str]) -> None:
    stored.write_text(FILE)
    ended = light("settings", "set", name, value)
    assert (ended.code, ended.out) == (1, "")
    for each in said:
        assert each in ended.err
    assert KEY not in ended.err
    assert stored.read_text() == FILE


def test_the_environment_that_wins_is_said(light: Command, stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFDRAFT_PORT", "x")  # nonsense there does not keep the file from being mended
    ended = light("settings", "set", "port", "8001")
    assert ended.code == 0
    assert "SELFDRAFT_PORT is set in the environment, which wins" in ended.err
    monkeypatch.delenv("SELFDRAFT_PORT")
    assert light("settings", "set", "port", "8001").err == ""


def test_unset(light: Command, stored: Path) -> None:
    stored.write_text(FILE + "modl = 1\n")
    assert light("settings", "unset", "port").out == f"{stored}: port is gone\n"
    assert "8001" not in stored.read_text()
    assert "# about start\n[start]" in stored.read_text()
    ended = light("settings", "unset", "port")
    assert (ended.code, ended.out) == (0, "")
    assert "port is not set there" in ended.err
    assert light("settings", "get").code == 1  # a line that nobody knows
    assert light("settings", "unset", "start.modl").code == 0
    assert light("settings", "get").code == 0
    for name in ("server", "prot", "start.prot", "nowhere.x"):
        before = stored.read_text()
        assert light("settings", "unset", name).code == 1
        assert stored.read_text() == before


def test_variables_that_are_no_settings(monkeypatch: pytest.MonkeyPatch, stored: Path) -> None:
    monkeypatch.setattr(
        "os.environ", {"SELFDRAFT_PROT": "1", "SELFDRAFT_PORT": "1", "PATH": "", "SELFDRAFT_QQQQQQQQ": "1"}
    )
    assert unknown_variables(kinds()) == {"SELFDRAFT_PROT": "SELFDRAFT_PORT", "SELFDRAFT_QQQQQQQQ": None}


def test_a_list_says_what_holds(stored: Path) -> None:
    found = {each.path: each for each in list_settings(kinds())}
    assert found["server.alias"].text == found["memory_limit"].text == "none"
    assert found["server.port"].text == "8000"
