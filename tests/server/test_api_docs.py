"""Guards /docs and /openapi.json: nothing from elsewhere, nothing left out, and what they say is so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from selfdraft.server.api_docs import EXAMPLES

from .conftest import Running

READING = {"/health", "/metrics", "/v1/models", "/v1/models/{name}", "/tokenizer_info"}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def schema(client: httpx.Client) -> dict[str, Any]:
    body: dict[str, Any] = client.get("/openapi.json").json()
    return body


def operations(schema: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, found) for path, entry in schema["paths"].items() for method, found in entry.items()]


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(child)


def test_every_path_is_described(schema: dict[str, Any]) -> None:
    assert schema["openapi"].startswith("3.1")
    assert set(schema["paths"]) == READING | set(EXAMPLES)
    ids = [operation["operationId"] for _, _, operation in operations(schema)]
    assert len(set(ids)) == len(ids)
    for path, method, operation in operations(schema):
        assert method == ("get" if path in READING else "post")
        assert len(operation["summary"]) > 10, path
        assert {"200", "4XX", "5XX"} <= set(operation["responses"])
        assert "422" not in operation["responses"]
        assert set(re.findall(r"{(\w+)}", path)) == {
            entry["name"] for entry in operation.get("parameters", ()) if entry["in"] == "path"
        }


def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    references = [node["$ref"] for node in nodes(schema) if isinstance(node.get("$ref"), str)]
    assert references
    for reference in references:
        target: Any = schema
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]
        assert target["type"] == "object"
    assert not [node for node in nodes(schema) if "$defs" in node]


def test_nested_objects_are_spelled_out(schema: dict[str, Any]) -> None:
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    message = body["properties"]["messages"]["items"]
    assert {"role", "content", "tool_calls"} <= set(message["properties"])
    assert set(body["required"]) == {"model", "messages"}


@pytest.mark.parametrize("path", sorted(EXAMPLES))
def test_examples_are_answered(client: httpx.Client, schema: dict[str, Any], path: str) -> None:
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert body["example"] == EXAMPLES[path]
    assert set(body["example"]) <= set(body["schema"]["properties"])
    short = {"max_tokens": 4, "max_output_tokens": 4} if "count" not in path else {}
    answer = client.post(path, json={**body["example"], **short})
    assert answer.status_code == 200, answer.text
    kind = answer.headers["content-type"].split(";")[0]
    assert kind in schema["paths"][path]["post"]["responses"]["200"]["content"]


@pytest.mark.parametrize("path", sorted(EXAMPLES))
def test_refusals_look_as_described(client: httpx.Client, schema: dict[str, Any], path: str) -> None:
    described = schema["paths"][path]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]["$ref"]
    error = schema["components"]["schemas"][described.rsplit("/", 1)[1]]
    body = client.post(path, content=b"[]").json()
    assert set(body) == set(error["required"]) == set(error["properties"])
    assert set(body["error"]) == set(error["properties"]["error"]["required"])


def test_the_page_shows_all_paths_and_loads_nothing_from_elsewhere(
    client: httpx.Client, server: Running, schema: dict[str, Any]
) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"} <= set(policy)
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    for path, method, operation in operations(schema):
        assert f'<span class="method">{method.upper()}</span> {path}</h2>' in page.text
        address = path.replace("{name}", "default")
        assert f"curl {server.url}{address}" in page.text
        if method == "get":
            assert client.get(address).status_code == 200
        assert operation["summary"].replace("'", "&#39;") in page.text
    linked = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert len(linked) > 4
    for address in linked:
        assert address.startswith("/")
        assert client.get(address).status_code == 200, address
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page.text)


def test_the_examples_on_the_page_can_be_pasted(client: httpx.Client) -> None:
    commands = re.findall(r"curl \S+ \\\n  -H &#39;[\w: /-]+&#39; \\\n  -d &#39;(.*)&#39;", client.get("/docs").text)
    bodies = [json.loads(command.replace("&#34;", '"')) for command in commands]
    assert sorted(map(str, bodies)) == sorted(map(str, EXAMPLES.values()))


def test_a_host_name_cannot_write_into_the_page(client: httpx.Client) -> None:
    answer = client.get("/docs", headers={"host": 'localhost"><script>'})
    assert answer.status_code == 400
    assert "<script>" not in answer.text


@pytest.mark.parametrize("path", ["/redoc", "/docs/oauth2-redirect"])
def test_pages_with_scripts_from_elsewhere_are_gone(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404
