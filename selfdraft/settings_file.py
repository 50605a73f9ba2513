"""settings.toml: where it lies, what is in it, and changing a line of it. Knows TOML; no setting."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from .errors import InvalidRequest
from .files import write_atomically

__all__ = ["Stored", "forget", "read_settings", "remember", "settings_path"]

Stored = str | int | float | bool | list[str]

_HEADING = "# Settings of Selfdraft. Arguments and SELFDRAFT_* in the environment win over them.\n\n"


def settings_path() -> Path:
    """Where settings.toml lies: in $SELFDRAFT_CONFIG_DIR, else in the user's configuration folder."""
    folder = os.environ.get("SELFDRAFT_CONFIG_DIR")
    return (Path(folder).expanduser() if folder else platformdirs.user_config_path("selfdraft")) / "settings.toml"


def read_settings() -> dict[str, Any]:
    """What is in it; nothing if it is not there.

    Raises:
        InvalidRequest: it cannot be read as TOML.
    """
    path = settings_path()
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{path}: cannot be read as TOML ({error}); correct it, or delete it to have the defaults back"
        ) from error


def remember(table: str, values: Mapping[str, Stored]) -> Path:
    """Write values into a table; everything else in the file stays, comments too.

    Args:
        table: its name; "" is the top of the file, before any table.

    Returns:
        Where they are now.

    Raises:
        InvalidRequest: the file cannot be read as TOML. OSError: it cannot be written.
    """
    content, path = read_settings(), settings_path()
    text = path.read_text(encoding="utf-8") if content or path.exists() else _HEADING
    for name, value in reversed(list(values.items())):  # each new line goes above those before it
        text = _with_value(text, table, name, value)
    write_atomically(path, text)
    return path


def forget(table: str, name: str) -> bool:
    """Take a value out of a table, "" for the top; everything else in the file stays.

    Returns:
        Whether it was there. A table is no value, and stays.

    Raises:
        InvalidRequest: the file cannot be read as TOML. OSError: it cannot be written.
    """
    import tomlkit

    content, path = read_settings(), settings_path()
    part = content.get(table) if table else content
    if not isinstance(part, dict) or isinstance(part.get(name, {}), dict):
        return False
    document: Any = tomlkit.parse(path.read_text(encoding="utf-8"))
    del (document[table] if table else document)[name]
    write_atomically(path, tomlkit.dumps(document))
    return True


def _with_value(text: str, table: str, name: str, value: Stored) -> str:
    """The file's text with a value in a table."""
    import tomlkit

    document: Any = tomlkit.parse(text)
    if table and table not in document:
        document.add(table, tomlkit.table())
    part = document[table] if table else document
    new = name not in part
    part[name] = value
    changed = tomlkit.dumps(document)
    if not new:
        return changed
    # Appended to what is there, a new line would stand behind the comments about what follows.
    placed = _with_line(text, table, f"{name} = {tomlkit.item(value).as_string()}\n")
    return placed if placed and tomllib.loads(placed) == tomllib.loads(changed) else changed


def _with_line(text: str, table: str, line: str) -> str | None:
    """The text with a line below a table's heading, None if it has none; or at the top, below an opening comment."""
    opening = re.compile(rf"^\[{re.escape(table)}\][^\n]*\n" if table else r"\A(#[^\n]*\n)+\n", re.MULTILINE)
    found = opening.search(text)
    if found is None:
        return None if table else line + ("\n" if text.startswith("[") else "") + text
    rest = text[found.end() :]
    return text[: found.end()] + line + ("\n" if rest.startswith("[") else "") + rest
