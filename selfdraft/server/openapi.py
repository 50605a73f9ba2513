"""How request bodies look in /openapi.json. Knows JSON schemas; nothing of what the bodies mean."""

from __future__ import annotations

from typing import Any

from .dialects.wire import WireModel

__all__ = ["described"]

_REFERENCE = "#/$defs/{model}"


def described(request: type[WireModel]) -> dict[str, Any]:
    """The arguments of a route whose body it reads by itself: `@app.post(path, **described(Request))`."""
    schema = request.model_json_schema(ref_template=_REFERENCE)
    # Inlined: different dialects have models of the same name, and no model refers to itself.
    inlined = _inlined(schema, schema.pop("$defs", {}))
    body = {"required": True, "content": {"application/json": {"schema": inlined}}}
    return {"response_model": None, "openapi_extra": {"requestBody": body}}


def _inlined(value: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_inlined(entry, definitions) for entry in value]
    if not isinstance(value, dict):
        return value
    if isinstance(reference := value.get("$ref"), str):
        return _inlined(definitions[reference.removeprefix(_REFERENCE.format(model=""))], definitions)
    return {key: _inlined(entry, definitions) for key, entry in value.items()}
