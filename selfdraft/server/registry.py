"""Which names the served models answer to. A name from a request is looked up here, and is never a path."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InvalidRequest, ModelNotFound

__all__ = ["DEFAULT", "Given", "Registry", "Resolved"]

DEFAULT = "default"
"""The name that means the first model whatever it is called, and however strictly names are taken."""


class Given(NamedTuple):
    """A model as the user gave it: `name` is what it is served as, `source` what it is loaded as."""

    name: str
    source: str

    @classmethod
    def parse(cls, text: str) -> Given:
        """One of a command line: SOURCE, or NAME=SOURCE. By itself a folder goes by its last part."""
        name, is_named, source = text.partition("=")
        if is_named and name and source and "/" not in name:
            return cls(name, source)
        return cls(text.rstrip("/").rsplit("/", 1)[-1] if text.startswith(("/", ".", "~")) else text, text)


class Resolved(NamedTuple):
    """What a name means: the name that a response carries, and the model."""

    shown: str
    model: str


class Registry:
    """The models' own names and their aliases.

    Args:
        models: each served name once; the first is the default.
        aliases: further names, each "NAME", for the default, or "NAME=MODEL", by the model's name or source.
        lenient: let any name mean the model, if there is one alone. Coding agents ask for several at once, and on one's
            own machine with one model there is nothing to confuse.

    Attributes:
        silent: names of models that write no text: however names are taken, these mean no model that does.

    Raises:
        InvalidRequest: a name that would mean two models, or an alias of none that is served.
    """

    def __init__(self, models: Sequence[Given], aliases: Sequence[str] = (), *, lenient: bool) -> None:
        self.created = int(time.time())
        self.silent: tuple[str, ...] = ()
        self._lenient = lenient and len(models) == 1
        self._first = models[0].name
        self._models: dict[str, str] = {}
        for name, source in models:
            if name in self._models:
                raise InvalidRequest(
                    f"two models would be called {name!r}: serve one as NAME={source}, with a name of its own",
                    param="model",
                )
            self._models[name] = name
        sources = {source: name for name, source in reversed(models)}
        for alias in aliases:
            short, _, target = alias.partition("=")
            served = sources.get(target, target) if target else self._first
            if not short or self._models.get(served) != served:
                raise InvalidRequest(
                    f"--alias {alias!r}: {target!r} is not the model that is served, {', '.join(self._models)}",
                    param="alias",
                )
            if self._models.setdefault(short, served) != served or (short == DEFAULT and served != self._first):
                raise InvalidRequest(f"--alias {alias!r}: {short!r} means another model already", param="alias")

    @property
    def models(self) -> list[str]:
        """The models' own names, the first one's first."""
        return [name for name, model in self._models.items() if name == model]

    @property
    def names(self) -> list[str]:
        """Every name that a model is listed under: their own first."""
        return list(self._models)

    def resolve(self, name: str | None) -> Resolved:
        """What a name of a request means.

        Args:
            name: `DEFAULT` or nothing is the first model.

        Raises:
            InvalidRequest: it is a model that writes no text.
            ModelNotFound: it is none of the names, and names are taken strictly.
        """
        if name in self.silent:
            raise InvalidRequest(f"{name!r} writes no text; there is {', '.join(self.names)}", param="model")
        if name is None or name in self._models:
            return Resolved(name or self._first, self._models[name or self._first])
        if self._lenient or name == DEFAULT:
            return Resolved(self._first, self._first)
        raise ModelNotFound(f"no model {name[:200]!r} here; there is {', '.join(self.names)}")
