"""Which names the loaded model answers to. A name from a request is looked up here, and is never a path."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..errors import InvalidRequest, ModelNotFound

__all__ = ["DEFAULT", "Registry"]

DEFAULT = "default"
"""The name that means the model whatever it is called, and however strictly names are taken."""


class Registry:
    """The model's own name and its aliases.

    Args:
        name: what it was loaded as; a folder goes by its last part.
        aliases: further names, each "NAME" or "NAME=MODEL".
        lenient: let any name mean the model. Coding agents ask for several at once, and on one's own machine with one
            model there is nothing to confuse.
    """

    def __init__(self, name: str, aliases: Sequence[str] = (), *, lenient: bool) -> None:
        self.name = name.rstrip("/").rsplit("/", 1)[-1] if name.startswith(("/", ".", "~")) else name
        self.created = int(time.time())
        self._lenient = lenient
        self.aliases: list[str] = []
        for alias in aliases:
            short, _, target = alias.partition("=")
            if not short or (target and target not in (name, self.name)):
                raise InvalidRequest(
                    f"--alias {alias!r}: {target!r} is not the model that is served, {self.name!r}", param="alias"
                )
            self.aliases.append(short)

    @property
    def names(self) -> list[str]:
        """Every name it is listed under."""
        return list(dict.fromkeys([self.name, *self.aliases]))

    def resolve(self, name: str | None) -> str:
        """The name a response carries.

        Args:
            name: what a request asks for; `DEFAULT` or nothing is the model.

        Raises:
            ModelNotFound: it is none of the names, and names are taken strictly.
        """
        if name is None or name in self.names:
            return name or self.name
        if self._lenient or name == DEFAULT:
            return self.name
        raise ModelNotFound(f"no model {name[:200]!r} here; there is {', '.join(self.names)}")
