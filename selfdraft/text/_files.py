"""Reads a checkpoint's small JSON files. Knows paths and errors; knows nothing of what the files mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

__all__ = ["read_json", "read_text", "token_content"]


def read_text(path: Path) -> str | None:
    """The file's text; None when there is no such file. CheckpointError when it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. Download the file again.") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} when there is no such file. CheckpointError for anything else."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}. Download the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def token_content(value: object) -> str | None:
    """A special token's text: tokenizer_config.json writes it as a string or as {"content": string}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
