"""Every setting with its value, where that comes from and what it means; and the one that a name stands for.

Knows no setting by name: fields, sources and docstrings of the classes in `settings` say it all.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ByteSize

from .errors import InvalidRequest
from .settings import Origin, Stored, StoredSettings, checked, origins

__all__ = ["Setting", "find_setting", "list_settings", "stored_form", "unknown_variables"]

_PREFIX = "SELFDRAFT_"
_NO_SETTING = {"SELFDRAFT_CONFIG_DIR"}  # says where settings.toml is


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: its own.
        table: where it stands in settings.toml; "" is the top of the file.
        value: what holds, as JSON has it; secrets are masked.
        origin: where the value comes from.
        meaning: a sentence or two.
        variable: its name in the environment.
        kind: the class of settings that it belongs to.
    """

    name: str
    table: str
    value: Any
    origin: Origin
    meaning: str
    variable: str
    kind: type[StoredSettings]

    @property
    def path(self) -> str:
        """Its name with its table's, as TOML writes it."""
        return f"{self.table}.{self.name}" if self.table else self.name

    @property
    def text(self) -> str:
        """The value for people."""
        if self.value is None or self.value == []:
            return "none"
        return ", ".join(map(str, self.value)) if isinstance(self.value, list) else str(self.value)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        whole = {name: value for name, value in asdict(self).items() if name != "kind"}
        return {**whole, "name": self.path}


def list_settings(kinds: Sequence[type[StoredSettings]]) -> list[Setting]:
    """The settings of some kinds, each once, in the order of their definition.

    Raises:
        InvalidRequest: a value that is not allowed; see `settings.checked`.
    """
    found: list[Setting] = []
    for kind in kinds:
        values, known = checked(kind, {}), origins(kind, {})
        meanings = _meanings(kind)
        for name in _own(kind):
            found.append(
                Setting(
                    name,
                    kind.tables[-1],
                    _shown(getattr(values, name)),
                    known.get(name, "default"),
                    meanings.get(name, ""),
                    _variable(kind, name),
                    kind,
                )
            )
    return found


def find_setting(kinds: Sequence[type[StoredSettings]], name: str) -> tuple[type[StoredSettings], str, str]:
    """Which setting a name means, with its table or without.

    Returns:
        The kind it belongs to, its table, its own name.

    Raises:
        InvalidRequest: none, or several.
    """
    name = name.replace("-", "_")
    known = {(kind, field): f"{kind.tables[-1]}.{field}".lstrip(".") for kind in kinds for field in _own(kind)}
    found = [each for each, path in known.items() if name in (path, each[1])]
    if len(found) == 1:
        kind, field = found[0]
        return kind, kind.tables[-1], field
    if found:
        raise InvalidRequest(f"{name!r} may be {' or '.join(known[each] for each in found)}: write it so", param="name")
    near = difflib.get_close_matches(name, [*known.values(), *(field for _, field in known)], n=1)
    remedy = f"did you mean {near[0]}?" if near else "`selfdraft settings get` lists all"
    raise InvalidRequest(f"no setting {name!r}; {remedy}", param="name")


def stored_form(kind: type[StoredSettings], name: str, text: str) -> Stored:
    """A value as settings.toml has it, of a text.

    Raises:
        InvalidRequest: it is not allowed, or belongs elsewhere than in that file.
    """
    if name in kind.unstored:
        raise InvalidRequest(f"{name} is not kept in settings.toml: {kind.unstored[name]}", param=name)
    value = getattr(checked(kind, {name: text}), name)
    if isinstance(value, ByteSize):
        return int(text) if text.isdecimal() else text
    if isinstance(value, tuple):
        return [str(each) for each in value]
    return value if isinstance(value, bool | int | float) else text


def unknown_variables(kinds: Sequence[type[StoredSettings]]) -> dict[str, str | None]:
    """Variables of the environment that look like settings and are none, each with the nearest that is one."""
    known = {_variable(kind, name) for kind in kinds for name in _own(kind)} | _NO_SETTING
    strange = sorted(name for name in os.environ if name.upper().startswith(_PREFIX) and name.upper() not in known)
    ends = [name.removeprefix(_PREFIX) for name in known]
    near = {name: difflib.get_close_matches(name.upper().removeprefix(_PREFIX), ends, n=1) for name in strange}
    return {name: _PREFIX + found[0] if found else None for name, found in near.items()}


def _own(kind: type[StoredSettings]) -> list[str]:
    """Fields that a kind has of its own: others are listed where they come from."""
    inherited = {name for each in kind.__mro__[1:] if issubclass(each, StoredSettings) for name in each.model_fields}
    return [name for name in kind.model_fields if name not in inherited]


def _variable(kind: type[StoredSettings], name: str) -> str:
    return f"{kind.model_config['env_prefix']}{name}".upper()


def _shown(value: Any) -> Any:
    """As JSON has it; a secret as the asterisks that are its text."""
    if isinstance(value, tuple):
        return [_shown(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _meanings(kind: type[StoredSettings]) -> dict[str, str]:
    """What the "Attributes" of a class's docstring say of each field."""
    _, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", attributes):
        names, _, meaning = entry.strip().partition(": ")
        for name in names.split(", "):
            found[name] = " ".join(meaning.split())
    return found
