"""Merging settings into other programs' configuration files: comments stay, a copy is kept. Knows no client."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SelfdraftError
from ..files import write_atomically

__all__ = ["FORMATS", "Written", "render", "write"]


@dataclass(frozen=True)
class Written:
    """What became of a file.

    Attributes:
        path: the file.
        changes: a line for each setting that changed; none if all was so already.
        backup: the copy of what was there before; None if nothing was, or nothing changed.
    """

    path: Path
    changes: list[str]
    backup: Path | None


@dataclass(frozen=True)
class _Format:
    """How a kind of file is read, so that it can be written again with all that is in it."""

    name: str
    read: Callable[[str], tuple[Any, Callable[[Any], str]]]


def render(format: str, settings: Mapping[str, Any]) -> str:
    """Settings as they would stand in a file of their own."""
    content, dump = FORMATS[format].read("")
    _merge(content, settings, "", [])
    return dump(content)


def write(path: Path, format: str, settings: Mapping[str, Any], absent: Mapping[str, Any]) -> Written:
    """Merge settings into a file, which is made if it is not there.

    Args:
        settings: nested; None takes a setting out, a list of mappings replaces the entries of the same name.
        absent: settings to add where there are none.

    Raises:
        SelfdraftError: the file cannot be read, understood or written, with the reason; it is as it was.
    """
    kind = FORMATS[format]
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        content, dump = kind.read(before)
    except (OSError, ValueError) as error:
        raise SelfdraftError(
            f"{path} cannot be read as {kind.name}, and is left as it is ({_reason(error)}): correct it, or add by "
            "hand what this command prints without --write"
        ) from error
    if not isinstance(content, MutableMapping):
        raise SelfdraftError(f"{path} holds {_kind(content)} where settings are expected, and is left as it is")
    changes: list[str] = []
    missing = {name: value for name, value in absent.items() if name not in content}
    try:
        _merge(content, {**missing, **settings}, "", changes)
    except _Mismatch as mismatch:
        raise SelfdraftError(f"{path}: {mismatch}; it is left as it is") from mismatch
    if not changes:
        return Written(path, [], None)
    try:
        backup = _copy(path, before) if path.exists() else None
        write_atomically(path, dump(content))
    except OSError as error:
        raise SelfdraftError(f"{path} cannot be written, and is left as it is: {error.strerror or error}") from error
    return Written(path, changes, backup)


class _Mismatch(Exception):
    """Something stands where settings of another shape belong."""


def _merge(into: MutableMapping[str, Any], settings: Mapping[str, Any], where: str, changes: list[str]) -> None:
    for name, value in settings.items():
        label = f"{where}{name}"
        if value is None:
            if name in into:
                del into[name]
                changes.append(f"removed {label}")
        elif isinstance(value, Mapping):
            if into.setdefault(name, {}) is None:  # an empty key of YAML
                into[name] = {}
            inner = into[name]
            if not isinstance(inner, MutableMapping):
                raise _Mismatch(f"{label} is {_kind(inner)}, not a group of settings")
            _merge(inner, value, f"{label}.", changes)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            if into.setdefault(name, []) is None:
                into[name] = []
            if not isinstance(into[name], MutableSequence):
                raise _Mismatch(f"{label} is {_kind(into[name])}, not a list")
            for entry in value:
                _merge_entry(into[name], entry, label, changes)
        elif name not in into or into[name] != value:
            changes.append(f"{'changed' if name in into else 'added'} {label} = {json.dumps(value)}")
            into[name] = value


def _merge_entry(entries: MutableSequence[Any], wanted: Mapping[str, Any], label: str, changes: list[str]) -> None:
    """An entry is known by its first field."""
    name = next(iter(wanted))
    label = f"{label}[{name}={wanted[name]}]"
    for entry in entries:
        if isinstance(entry, MutableMapping) and entry.get(name) == wanted[name]:
            _merge(entry, wanted, f"{label}.", changes)
            return
    entries.append(dict(wanted))
    changes.append(f"added {label}")


def _kind(value: Any) -> str:
    if isinstance(value, MutableMapping):
        return "an object"
    return "a list" if isinstance(value, MutableSequence) else f"the value {str(value)[:40]!r}"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return " ".join(str(error).split())


def _copy(path: Path, text: str) -> Path:
    """A copy beside the file, with its permissions, under a name that no other copy has."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(100):
        backup = path.with_name(f"{path.name}.{stamp}{f'-{number}' if number else ''}.bak")
        try:
            handle = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IMODE(path.stat().st_mode))
        except FileExistsError:
            continue
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        return backup
    raise FileExistsError(f"{path}: there are a hundred copies of this second")


def _json(text: str) -> tuple[Any, Callable[[Any], str]]:
    try:
        content = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        if re.search(r"^\s*(//|/\*)", text, re.MULTILINE):
            raise ValueError("it has comments, which would be lost") from error
        raise
    found = re.search(r"\n([ \t]+)\S", text)
    indent = found[1] if found else "  "
    return content, lambda changed: f"{json.dumps(changed, indent=indent, ensure_ascii=False)}\n"


def _toml(text: str) -> tuple[Any, Callable[[Any], str]]:
    import tomlkit

    return tomlkit.parse(text), tomlkit.dumps


def _yaml(text: str) -> tuple[Any, Callable[[Any], str]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.error import YAMLError

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 10_000  # long lines stay as they are
    if not text.strip() or re.search(r"^ +- ", text, re.MULTILINE):
        yaml.indent(mapping=2, sequence=4, offset=2)
    try:
        content = yaml.load(text)
    except YAMLError as error:
        raise ValueError(str(error)) from error

    def dump(changed: Any) -> str:
        out = io.StringIO()
        yaml.dump(changed, out)
        return out.getvalue()

    return CommentedMap() if content is None else content, dump


FORMATS = {"json": _Format("JSON", _json), "toml": _Format("TOML", _toml), "yaml": _Format("YAML", _yaml)}
