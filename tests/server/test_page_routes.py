"""The chat page over HTTP: its files, headers and limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import resources

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from selfdraft.llm import LLM
from selfdraft.server.page import router, routes
from selfdraft.server.page.process import RenderProcess
from selfdraft.server.page.routes import MAX_BODY

from .conftest import running

STATIC = resources.files("selfdraft.server.page") / "static"
NAMES = sorted(entry.name for entry in STATIC.iterdir())


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(router())
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/page.css", "/page/highlight.css", "/page/nothing"])
def test_every_answer_carries_the_security_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_served_with_its_type(client: TestClient, name: str) -> None:
    answer = client.get(f"/page/{name}")
    assert answer.status_code == 200
    assert answer.text == (STATIC / name).read_text(encoding="utf-8")
    kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}
    assert answer.headers["content-type"].startswith(kind[name.split(".")[-1]])


@pytest.mark.parametrize("path", ["/page/..%2froutes.py", "/page/%2e%2e/routes.py", "/page/routes.py", "/page/a/b"])
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|https?://", html)
    for name in NAMES:
        text = (STATIC / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, name
        assert "https://" not in text, name


def test_the_files_stay_small() -> None:
    sizes = {name: len((STATIC / name).read_bytes()) for name in NAMES}
    assert sum(sizes.values()) < 120_000
    for name in NAMES:
        if name.endswith(".js"):
            assert (STATIC / name).read_text(encoding="utf-8").count("\n") < 300, name


def test_one_module_writes_html() -> None:
    for name in NAMES:
        text = (STATIC / name).read_text(encoding="utf-8")
        assert ("innerHTML" in text) == (name == "markdown.js"), name
        assert not re.search(r"insertAdjacentHTML|document\.write|\beval\(|new Function", text), name


def test_markdown_is_rendered(client: TestClient) -> None:
    answer = client.post("/page/render", json={"text": "*a* <b>"})
    assert answer.json() == {"html": "<p><em>a</em> &lt;b&gt;</p>\n"}
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_process_that_renders_ends_with_the_server(
    load_nano: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = RenderProcess()  # kept here: no collection of garbage ends it
    monkeypatch.setattr(routes, "RenderProcess", lambda: renderer)
    with running(load_nano) as server, server.client() as client:
        assert client.post("/page/render", json={"text": "*a*"}).status_code == 200
        child = renderer._child
        assert child is not None
        assert child.poll() is None
    assert child.poll() is not None


def test_a_text_above_the_limit_is_refused(client: TestClient) -> None:
    answer = client.post("/page/render", json={"text": "a" * MAX_BODY})
    assert answer.status_code == 413
    assert str(MAX_BODY) in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"x", b"[]", b"{}", b'{"text": 1}', b'{"text": "\\ud800"}', b"\xff", b"[" * 100_000, b'{"text": null}'],
)
def test_a_body_that_is_none_is_refused(client: TestClient, body: bytes) -> None:
    answer = client.post("/page/render", content=body)
    assert answer.status_code == 422
    assert "text" in answer.json()["error"]["message"]
