"""/docs and /openapi.json: what the paths take and how they refuse. Knows the application's schema, and no model."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, StrictUndefined

from .page import HEADERS
from .registry import DEFAULT

__all__ = ["EXAMPLES", "add_docs"]

EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": DEFAULT, "messages": [{"role": "user", "content": "Hello"}], "stream": True},
    "/v1/completions": {"model": DEFAULT, "prompt": "Once upon a time", "max_tokens": 32},
    "/v1/responses": {"model": DEFAULT, "input": "Hello"},
    "/v1/messages": {"model": DEFAULT, "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/messages/count_tokens": {"model": DEFAULT, "messages": [{"role": "user", "content": "Hello"}]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
}

_SUMMARIES = {
    "/v1/chat/completions": "A chat, in the form of OpenAI's chat completions",
    "/v1/completions": "Bare prompts, in the form of OpenAI's completions",
    "/v1/responses": "A chat, in the form of OpenAI's responses; nothing is stored",
    "/v1/messages": "A chat, in the form of Anthropic's messages",
}
_NOTES = {
    "model": f'a name of the model; "{DEFAULT}" always is one',
    "depth": 'tokens drafted a cycle: 0 is plain decoding, "auto" follows what is accepted',
    "timings_per_token": "figures of speed and acceptance with every piece of a stream",
    "ignore_eos": "go on behind the end token",
    "min_tokens": "no end before so many tokens",
    "cache_prompt": "whether to go on from warm prefixes and leave some; on if not said",
    "enable_thinking": "whether the template opens the reasoning",
    "thinking_budget": "most tokens of reasoning",
    "chat_template_kwargs": "variables of the chat template",
    "response_format": "text, json_object, json_schema; also grammar (Lark) and regex",
}
_REFUSALS = {
    "4XX": "400 not understood, or context_length_exceeded; 401 the API key; 403 Host or Origin; 404 no such path or "
    "model; 405 method; 408 the body came too slowly; 413 too large; 429 too many requests wait (Retry-After)",
    "5XX": "500 the server failed; 503 the model is still being loaded (Retry-After); 507 no memory for it now",
}
_TEXT = {"type": "string"}
_OPENAI_ERROR = {
    "title": "Error",
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": _TEXT,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_ANTHROPIC_ERROR = {
    "title": "AnthropicError",
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": _TEXT, "message": _TEXT},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def add_docs(app: FastAPI) -> None:
    """Serve /docs, and complete what /openapi.json says. Call it when all other paths are there."""
    plain = app.openapi
    source = (resources.files(__package__) / "page" / "docs.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, lstrip_blocks=True).from_string(source)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(plain())
        return plain()

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        schema = app.openapi()
        page = template.render(info=schema["info"], refusals=_REFUSALS, paths=_paths(schema, str(request.base_url)))
        return HTMLResponse(page, headers=HEADERS)

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(schema: dict[str, Any]) -> None:
    """Adds examples, error responses and the API key to the schema that FastAPI makes of the routes."""
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own: no parameter here can be at fault
        schemas.pop(unused, None)
    schemas.update({error["title"]: error for error in (_OPENAI_ERROR, _ANTHROPIC_ERROR)})
    components["securitySchemes"] = _SECURITY
    schema["security"] = [{}, *({name: []} for name in _SECURITY)]
    for path, operations in schema["paths"].items():
        error = _ANTHROPIC_ERROR if path.startswith("/v1/messages") else _OPENAI_ERROR
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error['title']}"}}}
        for operation in operations.values():
            operation["summary"] = _SUMMARIES.get(path, operation["summary"])
            responses = operation["responses"]
            responses.pop("422", None)
            for status, text in _REFUSALS.items():
                responses[status] = {"description": text, "content": content}
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]
                if "example" not in body:
                    body["example"] = EXAMPLES[path]
                fields = body["schema"]["properties"]
                for name in fields.keys() & _NOTES:
                    fields[name]["description"] = _NOTES[name]
                if "stream" in fields:
                    responses["200"]["content"]["text/event-stream"] = {}  # events of many kinds


def _paths(schema: dict[str, Any], address: str) -> list[dict[str, Any]]:
    """What the page shows of each path and method."""
    shown = []
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            url = address.rstrip("/") + path
            for parameter in operation.get("parameters", ()):
                url = url.replace(f"{{{parameter['name']}}}", parameter["schema"]["examples"][0])
            shown.append(
                {
                    "method": method.upper(),
                    "path": path,
                    "summary": operation["summary"],
                    "fields": _fields(body["schema"]) if body else [],
                    "schema": json.dumps(body["schema"], indent=2) if body else "",
                    "curl": _curl(url, body["example"]) if body else f"curl {url}",
                }
            )
    return shown


def _fields(schema: dict[str, Any]) -> list[dict[str, Any]]:
    required = schema.get("required", ())
    fields = [
        {"name": name, "type": _type(field), "required": name in required, "note": field.get("description", "")}
        for name, field in schema["properties"].items()
    ]
    return sorted(fields, key=lambda field: not field["required"])


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(_type(kind) for kind in schema["anyOf"] if kind.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None and most is None:
        return kind
    return f"{kind} from {least:g}" if most is None or most >= 2**31 - 1 else f"{kind} {least:g} to {most:g}"


def _curl(url: str, body: dict[str, Any]) -> str:
    return f"curl {url} \\\n  -H 'Content-Type: application/json' \\\n  -d '{json.dumps(body)}'"
