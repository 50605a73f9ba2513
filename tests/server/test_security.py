"""Guards who may talk to the server: web pages, other names, other machines, callers without a key."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfdraft.errors import InvalidRequest, ModelNotFound
from selfdraft.llm import LLM
from selfdraft.server.config import load_server_settings
from selfdraft.server.registry import Registry
from selfdraft.server.security import host_name, is_loopback

from .conftest import Running, running

KEY = "a-long-enough-key-for-tests"


@pytest.fixture(scope="module")
def guarded(load_nano: Callable[[], LLM]) -> Iterator[Running]:
    with running(
        load_nano, api_key=KEY, cors_origin=("https://app.example",), allowed_host=("box.lan",), max_body=1
    ) as server:
        yield server


def test_only_known_hosts_are_answered(server: Running) -> None:
    with server.client() as client:
        for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1", "app.localhost", "127.1.2.3"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "192.0.2.1", "[2001:db8::1]:8000"):
            refused = client.get("/v1/models", headers={"host": host})
            assert refused.status_code == 403, host
            assert "--allowed-host" in refused.json()["error"]["message"]
        for host in ("", "local host", "localhost:99999", "[::1", "a/b", "user@localhost"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 400, host


def test_two_host_headers_are_refused(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b" 400 " in connection.recv(200)


def test_pages_of_other_origins_are_turned_away(server: Running) -> None:
    with server.client() as client:
        own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
        assert client.get("/v1/models", headers=own).status_code == 200
        for origin in ("https://evil.example", "null", "http://localhost:3000", "file://", "http://[::1", "http://"):
            refused = client.get("/v1/models", headers={"host": "localhost:8000", "origin": origin})
            assert refused.status_code == 403, origin
            assert "access-control-allow-origin" not in refused.headers
        asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        assert client.options("/v1/chat/completions", headers=asked).status_code == 403


def test_allowed_origins_and_names(guarded: Running) -> None:
    with guarded.client() as client:
        origin = {"origin": "https://app.example"}
        asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = client.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = client.get("/v1/models", headers={**origin, "host": "box.lan:80", "x-api-key": KEY})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_the_key_guards_all_but_the_page_and_health(guarded: Running) -> None:
    with guarded.client() as client:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/docs", "/nothing"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
            assert client.get(path, headers={"authorization": f"Basic {KEY}"}).status_code == 401
        assert client.post("/page/render", json={"text": "x"}).status_code == 401
        for headers in ({"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/").status_code == 200
        refused = client.post("/v1/messages", json={})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert KEY not in refused.text


def test_a_body_is_bounded_however_it_comes(guarded: Running) -> None:
    headers = {"x-api-key": KEY}
    with guarded.client(headers=headers) as client:
        assert client.post("/v1/chat/completions", content=b"x" * (2**20 + 1)).status_code == 413
        chunks = (b"x" * 2**16 for _ in range(20))
        assert client.post("/v1/chat/completions", content=chunks).status_code == 413
        assert client.post("/v1/chat/completions", content=b"x" * 2**20).status_code == 400


def test_other_machines_need_a_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--api-key-file"):
        load_server_settings(host="0.0.0.0").access()
    for host in ("127.0.0.1", "::1", "localhost"):
        assert load_server_settings(host=host).access().key is None
    path = tmp_path / "key"
    access = load_server_settings(host="0.0.0.0", api_key_file=path).access()
    assert access.key == path.read_text().strip()
    assert len(access.key) > 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert access.any_address
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        load_server_settings(api_key_file=path).access()
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(InvalidRequest, match="at least 16"):
        load_server_settings(api_key_file=path).access()


def test_settings_are_checked_and_a_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"port": 70000}, {"rows": 0}, {"keepalive": 0}, {"ctx_size": 3}, {"cors_origin": ("*",)}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            load_server_settings(**wrong)
    monkeypatch.setenv("SELFDRAFT_API_KEY", KEY)
    assert load_server_settings(host="0.0.0.0").access().key == KEY
    monkeypatch.setenv("SELFDRAFT_API_KEY", "short")
    with pytest.raises(InvalidRequest, match="SELFDRAFT_API_KEY must be at least 16") as refused:
        load_server_settings().access()
    assert "short" not in str(refused.value)
    monkeypatch.delenv("SELFDRAFT_API_KEY")
    monkeypatch.setenv("SELFDRAFT_ALIAS", "fast, gpt-4o=nano")
    assert load_server_settings().alias == ("fast", "gpt-4o=nano")
    with pytest.raises(InvalidRequest, match="no setting 'prot'"):
        load_server_settings(prot=1)
    monkeypatch.setenv("SELFDRAFT_PORT", "x")
    with pytest.raises(InvalidRequest, match="SELFDRAFT_PORT"):
        load_server_settings()


def test_names_of_models() -> None:
    registry = Registry("owner/name", ("fast", "gpt-4o=owner/name"), lenient=False)
    assert registry.names == ["owner/name", "fast", "gpt-4o"]
    assert registry.resolve("gpt-4o") == "gpt-4o"
    assert registry.resolve(None) == "owner/name"
    with pytest.raises(ModelNotFound, match="fast"):
        registry.resolve("/etc/passwd")
    assert Registry("/home/x/models/nano/", lenient=True).resolve("claude-opus") == "nano"
    with pytest.raises(InvalidRequest, match="--alias"):
        Registry("a", ("b=c",), lenient=True)


@given(st.text(max_size=40))
def test_any_host_header_has_a_name_or_none(text: str) -> None:
    name = host_name(text)
    if name is not None:
        assert not set(name) & set(" /@?#\\,;")
        is_loopback(name)


def test_a_name_that_only_looks_like_loopback_is_not() -> None:
    for name in ("127.0.0.1.evil.example", "localhost.evil", "0.0.0.0", "notlocalhost", "::ffff:7f00:1x"):
        assert not is_loopback(name)
    assert json.dumps([is_loopback(name) for name in ("127.9.9.9", "::1", "localhost")]) == "[true, true, true]"
