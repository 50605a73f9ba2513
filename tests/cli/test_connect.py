"""Guards `selfdraft connect`: what each client is told, and that its file loses nothing but what is replaced."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from selfdraft.cli import config_files, server_client
from selfdraft.cli.clients import CLIENTS, Endpoint, Key
from selfdraft.cli.config_files import write
from selfdraft.errors import SelfdraftError
from selfdraft.llm import LLM
from tests.server.conftest import Running, running

from .conftest import Command

HERE = Endpoint("http://127.0.0.1:8000", "nano", 4096, 1024)
SECRET = "sd-this-is-a-secret-key"
GUARDED = Endpoint("http://127.0.0.1:8000", "nano", 4096, 1024, Key(needed=True))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any configuration, and without a server."""
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME", "CONTINUE_GLOBAL_DIR", "SELFDRAFT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SELFDRAFT_PORT", "1")  # where nothing answers
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Running]:
    """A server; the shared model is only asked for its limits."""
    with running(lambda: llm) as found:
        yield found


# What each client is told


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_is_told_where_and_what(client: str) -> None:
    told = json.dumps(CLIENTS[client](HERE).settings)
    assert HERE.url in told
    assert "nano" in told
    assert "1024" in told or client in ("codex", "openwebui")  # those have no setting for it
    assert '"4096"' in told or "4096" in told or client in ("openwebui", "litellm")
    assert "limit" not in json.dumps(CLIENTS[client](Endpoint(HERE.url, "nano")).settings)


def test_claude_code() -> None:
    made = CLIENTS["claude-code"](HERE)
    env = made.settings["env"]
    assert env["ANTHROPIC_BASE_URL"] == HERE.url  # it adds /v1/messages itself
    assert {env[f"ANTHROPIC_DEFAULT_{each}_MODEL"] for each in ("OPUS", "SONNET", "HAIKU")} == {"nano"}
    assert env["ANTHROPIC_AUTH_TOKEN"] == "selfdraft"
    assert (env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"], env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == ("4096", "1024")
    assert all(isinstance(value, str) for value in env.values())
    guarded = CLIENTS["claude-code"](GUARDED).settings
    assert guarded["env"]["ANTHROPIC_AUTH_TOKEN"] is None  # it would win over the helper
    assert guarded["apiKeyHelper"] == "printenv SELFDRAFT_API_KEY"
    kept = CLIENTS["claude-code"](Endpoint(HERE.url, "nano", key=Key(True, Path("/a b/key"))))
    assert kept.settings["apiKeyHelper"] == "cat '/a b/key'"


def test_codex() -> None:
    told = CLIENTS["codex"](HERE).settings
    provider = told["model_providers"]["selfdraft"]
    assert provider == {
        "name": "Selfdraft",
        "base_url": f"{HERE.url}/v1",
        "wire_api": "responses",
        "env_key": None,
    }
    assert told["model_context_window"] - told["model_auto_compact_token_limit"] == 1024
    assert CLIENTS["codex"](GUARDED).settings["model_providers"]["selfdraft"]["env_key"] == "SELFDRAFT_API_KEY"


def test_opencode(home: Path) -> None:
    made = CLIENTS["opencode"](HERE)
    provider = made.settings["provider"]["selfdraft"]
    assert provider["options"] == {"baseURL": f"{HERE.url}/v1", "apiKey": "selfdraft"}
    assert provider["models"] == {"nano": {"name": "nano", "limit": {"context": 4096, "output": 1024}}}
    assert made.path == home / ".config/opencode/opencode.json"
    (home / ".config/opencode").mkdir(parents=True)
    (home / ".config/opencode/opencode.jsonc").write_text("{}")
    assert CLIENTS["opencode"](HERE).path == home / ".config/opencode/opencode.jsonc"
    assert "{env:SELFDRAFT_API_KEY}" in json.dumps(CLIENTS["opencode"](GUARDED).settings)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_key_is_named_never_written(
    client: str, home: Path, light: Command, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFDRAFT_API_KEY", SECRET)
    shown = light("connect", client)
    light("connect", client, "--write")
    written = "".join(path.read_text() for path in home.rglob("*") if path.is_file())
    assert SECRET not in shown.out + shown.err + written
    assert "SELFDRAFT_API_KEY" in shown.out


# The command


def test_limits_come_from_the_server(home: Path, served: Running, light: Command) -> None:
    ended = light("connect", "opencode", "--url", f"{served.url}/v1/", "--json")
    told = json.loads(ended.out)
    assert (told["url"], told["model"], told["context"], told["output"]) == (served.url, "nano", 32_768, 8_192)
    assert (told["written"], told["format"]) == (False, "json")
    limit = told["settings"]["provider"]["selfdraft"]["models"]["nano"]["limit"]
    assert limit == {"context": 32_768, "output": 8_192}
    named = json.loads(light("connect", "cline", "--url", served.url, "--model", "mine", "--json").out)
    assert named["settings"]["Model ID"] == "mine"


def test_a_server_with_a_key_is_asked_with_it(
    home: Path, llm: LLM, light: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(lambda: llm, api_key=SECRET) as guarded:
        refused = light("connect", "codex", "--url", guarded.url, "--json")
        assert "wants an API key: set SELFDRAFT_API_KEY" in refused.err
        assert json.loads(refused.out)["context"] is None
        monkeypatch.setenv("SELFDRAFT_API_KEY", SECRET)
        told = json.loads(light("connect", "codex", "--url", guarded.url, "--json").out)
        assert told["context"] == 32_768
        assert told["settings"]["model_providers"]["selfdraft"]["env_key"] == "SELFDRAFT_API_KEY"


def test_without_a_server_the_limits_are_left_out_and_that_is_said(home: Path, light: Command) -> None:
    ended = light("connect", "codex")
    assert ended.code == 0
    assert tomllib.loads(ended.out)["model_providers"]["selfdraft"]["base_url"] == "http://127.0.0.1:1/v1"
    assert "no server answers at http://127.0.0.1:1 (connection refused). The limits of its model are" in ended.err
    assert f"for {home / '.codex/config.toml'} (--write puts it there)" in ended.err


def test_what_answers_there_may_be_something_else(home: Path, light: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "_get", lambda *given: {"data": []})
    assert "is no server of Selfdraft's" in light("connect", "codex").err


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://x/v1/models", "http://"])
def test_a_url_is_checked(home: Path, light: Command, url: str) -> None:
    ended = light("connect", "codex", "--url", url)
    assert ended.code == 2
    assert repr(url) in ended.err


def test_an_unknown_client_is_wrong_usage(light: Command) -> None:
    ended = light("connect", "emacs")
    assert ended.code == 2
    assert "claude-code" in ended.err
    assert light("connect", "codex", "--file", "x").code == 2


@pytest.mark.parametrize("client", ["cline", "openwebui"])
def test_what_has_no_file_cannot_be_written(home: Path, light: Command, client: str) -> None:
    before = set(home.rglob("*"))
    ended = light("connect", client, "--write")
    assert (ended.code, ended.out) == (1, "")
    assert f"--write is not possible for {client}: " in ended.err
    assert set(home.rglob("*")) == before


def test_writing_says_what_changed_and_only_once(home: Path, served: Running, light: Command) -> None:
    first = light("connect", "codex", "--url", served.url, "--write")
    path = home / ".codex/config.toml"
    assert first.out.splitlines()[0] == str(path)
    assert '  added model = "nano"' in first.out.splitlines()
    assert tomllib.loads(path.read_text())["model_context_window"] == 32_768
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = json.loads(light("connect", "codex", "--url", served.url, "--write", "--json").out)
    assert (again["written"], again["changes"], again["backup"]) == (True, [], None)
    assert os.listdir(path.parent) == ["config.toml"]
    other = home / "other.toml"
    light("connect", "codex", "--url", served.url, "--write", "--file", str(other))
    assert other.read_text() == path.read_text()


# Files of others

JSON = '{\n    "permissions": {"allow": ["Bash(ls)"]},\n    "env": {"MINE": "é", "ANTHROPIC_MODEL": "old"}\n}\n'
TOML = """# my settings
model = "gpt"  # best

[model_providers.other]
name = "Other"  # keep

[profiles.x]
model = "y"
"""
YAML = """# my models
name: Mine
version: 1.2.3
schema: v1
models:
  - name: Other   # keep
    provider: ollama
    model: 'quoted'
  - name: Selfdraft
    provider: openai
    model: old
    apiBase: http://old
    requestOptions:
      timeout: 7
rules:
  - Be brief, and do not break this long line, which goes on and on and on and on, well past eighty columns.
"""
FILES: list[tuple[str, str, str, Callable[[str], Any]]] = [
    ("claude-code", "settings.json", JSON, json.loads),
    ("codex", "config.toml", TOML, tomllib.loads),
    ("continue", "config.yaml", YAML, yaml.safe_load),
]


def merged(client: str, path: Path) -> config_files.Written:
    made = CLIENTS[client](HERE)
    return write(path, made.format, made.settings, made.absent)


@pytest.mark.parametrize(("client", "name", "text", "read"), FILES)
def test_a_file_keeps_all_else_and_a_copy_stays(
    tmp_path: Path, client: str, name: str, text: str, read: Callable[[str], Any]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    path.chmod(0o640)
    written = merged(client, path)
    assert written.backup is not None
    assert written.backup.read_text() == text
    assert written.backup.name.startswith(name)
    assert {stat.S_IMODE(each.stat().st_mode) for each in (path, written.backup)} == {0o640}
    now, before = path.read_text(), read(text)
    made = CLIENTS[client](HERE)
    assert read(now) == _expected(before, made.settings)
    for line in text.splitlines():  # comments, quotes, order and long lines are as they were
        if client != "claude-code" and not any(each in line for each in ("old", "gpt")):
            assert line in now.splitlines()
    assert merged(client, path).changes == []
    assert path.read_text() == now
    assert len(list(tmp_path.iterdir())) == 2


def _expected(before: Any, settings: Any) -> Any:
    """A plain second way to merge."""
    after = dict(before)
    for name, value in settings.items():
        if isinstance(value, dict):
            after[name] = _expected(after.get(name, {}), value)
        elif isinstance(value, list) and isinstance(value[0], dict):
            old = {each["name"]: each for each in after.get(name, [])}
            new = {each["name"]: _expected(old.get(each["name"], {}), each) for each in value}
            after[name] = list((old | new).values())
        elif value is not None:
            after[name] = value
        else:
            after.pop(name, None)
    return after


def test_json_keeps_its_indentation_and_its_letters(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(JSON)
    merged("claude-code", path)
    assert '\n    "permissions": {\n        "allow"' in path.read_text()
    assert '"MINE": "é"' in path.read_text()


def test_a_setting_that_must_go_goes(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    merged("claude-code", path)
    made = CLIENTS["claude-code"](GUARDED)
    written = write(path, made.format, made.settings, made.absent)
    assert "removed env.ANTHROPIC_AUTH_TOKEN" in written.changes
    assert "ANTHROPIC_AUTH_TOKEN" not in json.loads(path.read_text())["env"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "settings.json"
    real.parent.mkdir()
    real.write_text(JSON)
    path = tmp_path / "settings.json"
    path.symlink_to(real)
    merged("claude-code", path)
    assert path.is_symlink()
    assert "MINE" in real.read_text()
    assert HERE.url in real.read_text()


BAD = [
    ("claude-code", "settings.json", "{", "cannot be read as JSON"),
    ("claude-code", "settings.json", '// mine\n{"env": {}}', "it has comments, which would be lost"),
    ("claude-code", "settings.json", "[1]", "holds a list where settings are expected"),
    ("claude-code", "settings.json", '{"env": ["x"]}', "env is a list, not a group of settings"),
    ("codex", "config.toml", "model = ", "cannot be read as TOML"),
    ("codex", "config.toml", "model_providers = 3", "model_providers is the value '3'"),
    ("continue", "config.yaml", "a: [1", "cannot be read as YAML"),
    ("continue", "config.yaml", "a: 1\na: 2", "found duplicate key"),
    ("continue", "config.yaml", "models: none", "models is the value 'none', not a list"),
    ("continue", "config.yaml", "just words", "holds the value 'just words'"),
]


@pytest.mark.parametrize(("client", "name", "text", "said"), BAD)
def test_a_file_that_is_not_understood_is_left_alone(
    tmp_path: Path, client: str, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SelfdraftError) as refused:
        merged(client, path)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert "left as it is" in str(refused.value)
    assert path.read_text() == text
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_is_no_text_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(SelfdraftError, match="cannot be read as JSON"):
        merged("claude-code", path)


def test_an_empty_group_of_yaml_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("name: Mine\nmodels:\n")
    merged("continue", path)
    assert yaml.safe_load(path.read_text())["models"][0]["name"] == "Selfdraft"


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    path = tmp_path / "folder" / "settings.json"
    path.parent.mkdir()
    if exists:
        path.write_text(JSON)

    def denied(*arguments: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied", str(path.parent))

    if os.geteuid() == 0:  # root may write anywhere
        monkeypatch.setattr("tempfile.mkstemp", denied)
        monkeypatch.setattr(config_files, "_copy", denied)
    else:
        path.parent.chmod(0o500)
    with pytest.raises(SelfdraftError, match="cannot be written, and is left as it is: Permission denied"):
        merged("claude-code", path)
    assert list(path.parent.iterdir()) == ([path] if exists else [])
    path.parent.chmod(0o700)


def test_copies_of_the_same_second_do_not_overwrite_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    path = tmp_path / "settings.json"
    for model in ("one", "two"):
        path.write_text(json.dumps({"model": model}))
        merged("claude-code", path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "settings.json",
        "settings.json.20260101-000000-1.bak",
        "settings.json.20260101-000000.bak",
    ]
