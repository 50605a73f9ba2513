"""Guards who may talk to the server: web pages, other names, other machines, callers without a key."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import selfdraft
from selfdraft.errors import InvalidRequest, ModelNotFound
from selfdraft.llm import LLM
from selfdraft.prompts import LOCAL
from selfdraft.server import security
from selfdraft.server.config import load_server_settings
from selfdraft.server.registry import Given, Registry
from selfdraft.server.security import host_name, is_loopback, owner_of

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
        refused = client.get("/v1/models", headers=origin)  # the page may say why
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        assert refused.headers["access-control-expose-headers"] == "Retry-After"
        answer = client.get("/v1/models", headers={**origin, "host": "box.lan:80", "x-api-key": KEY})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_the_key_guards_all_but_the_page_and_health(guarded: Running) -> None:
    with guarded.client() as client:
        for path in ("/v1/models", "/metrics", "/nothing"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
            assert client.get(path, headers={"authorization": f"Basic {KEY}"}).status_code == 401
        assert client.post("/page/render", json={"text": "x"}).status_code == 401
        for headers in (
            {"authorization": f"Bearer {KEY}"},
            {"authorization": f"bearer {KEY}"},
            {"x-api-key": KEY},
            {"authorization": "Bearer of-another-server", "x-api-key": KEY},
        ):
            assert client.get("/v1/models", headers=headers).status_code == 200
        for path in ("/health", "/", "/page/app.js", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200, path
        refused = client.post("/v1/messages", json={})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert KEY not in refused.text


def test_a_request_may_stay_out_of_the_cache(load_nano: Callable[[], LLM]) -> None:
    prompt = "A prompt that is long enough to be worth keeping, for it has many words in it. " * 4
    message = {"messages": [{"role": "user", "content": prompt}]}
    with running(load_nano) as server, server.client() as client:

        def cached(path: str, asked: dict[str, object], **given: object) -> int:
            body = client.post(path, json={"model": "nano", "max_tokens": 1, **asked, **given}).json()
            return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

        for _ in range(2):  # leaves nothing
            assert cached("/v1/completions", {"prompt": prompt}, cache_prompt=False) == 0
            assert cached("/v1/chat/completions", message, cache_prompt=False) == 0
        assert cached("/v1/completions", {"prompt": prompt}) == 0
        assert cached("/v1/completions", {"prompt": prompt}) > 50
        assert cached("/v1/completions", {"prompt": prompt}, cache_prompt=False) == 0  # nor takes any
        refused = client.post("/v1/completions", json={"model": "nano", "prompt": "x", "cache_prompt": "no"})
        assert refused.status_code == 400
        assert "cache_prompt" in refused.json()["error"]["message"]


def test_figures_of_all_are_for_the_first_key(load_nano: Callable[[], LLM], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key-of-three\nsecond-key-of-three\nthird-key-of-three\n")
    keys.chmod(0o600)
    with running(load_nano, api_key_file=keys) as server, server.client() as client:
        assert client.get("/metrics", headers={"x-api-key": "first-key-of-three"}).status_code == 200
        refused = client.get("/metrics", headers={"x-api-key": "second-key-of-three"})
        assert refused.status_code == 403
        assert "first of the API keys" in refused.json()["error"]["message"]
        assert client.get("/v1/models", headers={"x-api-key": "second-key-of-three"}).status_code == 200


def test_keys_are_compared_in_constant_time(guarded: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = security.hmac.compare_digest
    monkeypatch.setattr(security.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    with guarded.client() as client:
        assert client.get("/v1/models", headers={"x-api-key": KEY[:-1] + "x"}).status_code == 401
        assert client.get("/v1/models", headers={"x-api-key": "é".encode("latin-1")}).status_code == 401
        assert client.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
    assert all(key == KEY.encode() for _, key in compared)
    assert [given for given, _ in compared if given] == [(KEY[:-1] + "x").encode(), "é".encode(), KEY.encode()]


def test_a_key_is_never_an_argument() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "selfdraft", "serve", "--api-key", KEY], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "--api-key" in ended.stderr


def test_the_log_holds_no_key_and_no_text(load_nano: Callable[[], LLM], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # ours is the server's log
    logging.getLogger("httpcore").setLevel(logging.WARNING)

    def load() -> LLM:
        llm = load_nano()
        step, llm.broken = llm.engine.step, False  # type: ignore[attr-defined]

        def breaking() -> object:
            if llm.broken:  # type: ignore[attr-defined]
                llm.engine.step = step  # type: ignore[method-assign]
                with llm.engine._failing(llm.engine.rows):
                    raise RuntimeError("out of memory")
            return step()

        llm.engine.step = breaking  # type: ignore[assignment, method-assign]
        loaded.append(llm)
        return llm

    loaded: list[LLM] = []
    secret = "xylophone"
    chat = {"model": secret, "messages": [{"role": "user", "content": secret}], "max_tokens": 4}
    with running(load, api_key=KEY) as server, server.client(headers={"x-api-key": KEY}) as client:
        answers = [
            client.post("/v1/chat/completions", json=chat),
            client.post("/v1/chat/completions", json={**chat, "stream": True}),
            client.post("/v1/messages", json={**chat, "system": secret}),
            client.post("/v1/completions", json={"model": secret, "prompt": secret, "max_tokens": 4, "stop": secret}),
            client.post("/v1/chat/completions", json={**chat, "tools": secret}),
            client.post("/v1/chat/completions", content=f'{{"model": "{secret}'.encode()),
            client.post("/tokenize", json={"prompt": secret}),
            client.get(f"/v1/models/{secret}?{secret}"),
            client.get("/v1/models", headers={"x-api-key": KEY + "x"}),
        ]
        loaded[0].broken = True  # type: ignore[attr-defined]
        answers.append(client.post("/v1/chat/completions", json=chat))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 400, 400, 200, 404, 401, 500]
    written = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert "row done" in written
    assert "out of memory" in written
    assert KEY not in written
    assert secret not in written
    assert "its log says why" in answers[-1].text
    assert "out of memory" not in answers[-1].text  # it might name paths


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
        assert load_server_settings(host=host).access().keys == ()
    path = tmp_path / "key"
    access = load_server_settings(host="0.0.0.0", api_key_file=path).access()
    assert access.keys == (path.read_text().strip(),)
    assert len(access.keys[0]) > 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert access.any_address
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        load_server_settings(api_key_file=path).access()
    path.chmod(0o600)
    for content in ("short", f"{KEY}\nshort\n", "\n", "# a comment that is long enough\n"):
        path.write_text(content)
        with pytest.raises(InvalidRequest, match="at least 16"):
            load_server_settings(api_key_file=path).access()
    path.write_text(f"# whose it is\n{KEY}\n\n  {KEY}2\n")
    assert load_server_settings(api_key_file=path).access().keys == (KEY, f"{KEY}2")


def test_counting_tokens_says_nothing_of_what_others_said(load_nano: Callable[[], LLM]) -> None:
    """Ids that were committed for this machine's user are not served to a key."""
    messages = [{"role": "user", "content": "hello"}]
    with running(load_nano, api_key=KEY) as server, server.client(headers={"x-api-key": KEY}) as client:
        llm = server.service.llm
        text = llm.prompts.chat(messages).text or ""
        letters = [id for letter in text for id in llm.tokenizer.encode(letter, special=False)]
        assert llm.sessions is not None
        llm.prompts._transcripts.add(LOCAL, text, letters)  # type: ignore[union-attr]
        body = {"model": "nano", "messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
        found = client.post("/tokenize", json=body).json()
        counted = client.post("/v1/messages/count_tokens", json={"model": "nano", "messages": messages}).json()
        assert llm.prompts.chat(messages).tokens == letters
    assert found["tokens"] == llm.tokenizer.encode(text, special=True)
    assert counted["input_tokens"] < len(letters)


def test_each_key_of_a_file_opens_and_says_whose_a_request_is(tmp_path: Path, load_nano: Callable[[], LLM]) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n{KEY}2\n")
    path.chmod(0o600)
    prompt = "A prompt that is long enough to be worth keeping, for it has many words in it. " * 4
    asked = {"model": "nano", "prompt": prompt, "max_tokens": 1}
    cached: dict[str, list[int]] = {}
    with running(load_nano, api_key_file=path) as server:
        for key in (KEY, f"{KEY}2", KEY, f"{KEY}2"):
            with server.client(headers={"x-api-key": key}) as client:
                body = client.post("/v1/completions", json=asked).json()
            cached.setdefault(key, []).append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        with server.client(headers={"x-api-key": f"{KEY}3"}) as client:
            assert client.post("/v1/completions", json=asked).status_code == 401
    assert owner_of(KEY) != owner_of(f"{KEY}2") != LOCAL
    assert all(first == 0 and second > 50 for first, second in cached.values())


def test_settings_are_checked_and_a_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"port": 70000}, {"rows": 0}, {"keepalive": 0}, {"ctx_size": 3}, {"cors_origin": ("*",)}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            load_server_settings(**wrong)
    monkeypatch.setenv("SELFDRAFT_API_KEY", KEY)
    assert load_server_settings(host="0.0.0.0").access().keys == (KEY,)
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
    registry = Registry([Given.parse("owner/name")], ("fast", "gpt-4o=owner/name"), lenient=False)
    assert registry.names == ["owner/name", "fast", "gpt-4o"]
    assert registry.resolve("gpt-4o") == ("gpt-4o", "owner/name")
    assert registry.resolve(None) == registry.resolve("default") == ("owner/name", "owner/name")
    with pytest.raises(ModelNotFound, match="fast"):
        registry.resolve("/etc/passwd")
    assert Registry([Given.parse("/home/x/models/nano/")], lenient=True).resolve("claude-opus") == ("nano", "nano")
    with pytest.raises(InvalidRequest, match="--alias"):
        Registry([Given.parse("a")], ("b=c",), lenient=True)


PATHS = ("../../etc/passwd", "/etc/passwd", "~/.ssh/id_rsa", "Qwen/Qwen3-0.6B", "file:///etc", "..", ".", "", "a\x00b")


def test_a_models_name_is_never_a_path(
    load_nano: Callable[[], LLM], server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(load_nano, strict_model=True, alias=("fast",)) as strict, strict.client() as client:

        def touched(*given: object, **_: object) -> None:
            raise AssertionError(f"a request reached the disk: {given}")

        for name in ("selfdraft.source.find_model", "selfdraft.models.checkpoint.classify"):
            monkeypatch.setattr(name, touched)
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for name in PATHS:
            for path in ("/v1/chat/completions", "/v1/messages"):
                refused = client.post(path, json={**chat, "model": name})
                assert refused.status_code == 404, (name, refused.text)
                assert "nano, fast" in refused.json()["error"]["message"]
            assert client.post("/tokenize", json={"model": name, "prompt": "x"}).status_code == 404
        assert client.post("/v1/chat/completions", json={**chat, "model": "fast"}).json()["model"] == "fast"
        # The examples of /docs cannot know the name.
        assert client.post("/v1/chat/completions", json={**chat, "model": "default"}).json()["model"] == "nano"
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["nano", "fast"]
        with server.client() as lenient:
            for name in PATHS:
                assert lenient.post("/v1/chat/completions", json={**chat, "model": name}).json()["model"] == "nano"


def test_names_are_strict_where_others_can_reach_the_server(load_nano: Callable[[], LLM]) -> None:
    with (
        running(load_nano, host="0.0.0.0", api_key=KEY) as anywhere,
        anywhere.client(headers={"x-api-key": KEY}) as client,
    ):
        asked = {"model": "gpt-4o", "prompt": "x", "max_tokens": 1}
        assert client.post("/v1/completions", json=asked).status_code == 404
        # Any address may be called, no name: a name can be pointed here.
        assert client.get("/v1/models", headers={"host": "192.0.2.1:8000"}).status_code == 200
        assert client.get("/v1/models", headers={"host": "evil.example:8000"}).status_code == 403


def test_an_address_of_ipv6(load_nano: Callable[[], LLM]) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with running(load_nano, host="::1") as server:
        url = f"http://[::1]:{server.port}"
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            assert client.get("/v1/models", headers={"origin": url}).status_code == 200
            assert client.get("/v1/models", headers={"host": "[2001:db8::1]:80"}).status_code == 403


def test_images_are_not_fetched(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, server.client() as client:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        part = {"type": "image_url", "image_url": {"url": url}}
        asked = {"model": "m", "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=asked).status_code == 400
        source = {"type": "image", "source": {"type": "url", "url": url}}
        asked["messages"] = [{"role": "user", "content": [source]}]
        assert client.post("/v1/messages", json=asked).status_code == 400
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_the_context_can_be_bounded_and_a_bound_is_told(nano_folder: Path) -> None:
    def load() -> LLM:
        llm = selfdraft.load(str(nano_folder))
        llm.limit_context(100)
        return llm

    with running(load) as server, server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert model["max_model_len"] == 100
        asked = {"model": "m", "prompt": [5] * 100, "max_tokens": 1}
        refused = client.post("/v1/completions", json=asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        asked |= {"prompt": [5] * 90, "max_tokens": 1000, "ignore_eos": True, "temperature": 0}
        assert client.post("/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 10


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_a_key_file_is_made_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        load_server_settings(api_key_file=tmp_path / "key").access()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


@given(st.text(max_size=40))
def test_any_host_header_has_a_name_or_none(text: str) -> None:
    name = host_name(text)
    if name is not None:
        assert not set(name) & set(" /@?#\\,;")
        is_loopback(name)


def test_names_are_compared_without_port_and_brackets() -> None:
    names = ("Box.lan:8000", "[2001:db8::1]:80", "2001:db8::2", "a.example.")
    assert security.allowed_hosts(names) == {"box.lan", "2001:db8::1", "2001:db8::2", "a.example"}
    with pytest.raises(InvalidRequest, match="'http://box' is no name"):
        security.allowed_hosts(["http://box"])


def test_a_name_that_only_looks_like_loopback_is_not() -> None:
    for name in ("127.0.0.1.evil.example", "localhost.evil", "0.0.0.0", "notlocalhost", "::ffff:7f00:1x"):
        assert not is_loopback(name)
    assert json.dumps([is_loopback(name) for name in ("127.9.9.9", "::1", "localhost")]) == "[true, true, true]"
