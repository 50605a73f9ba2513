"""The one configuration object. Environment variables start with SELFDRAFT_; arguments win over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from .device import Blas, Dtype
from .errors import InvalidRequest

__all__ = ["Settings", "checked", "load_settings"]

Kind = TypeVar("Kind", bound=BaseSettings)


class Settings(BaseSettings):
    """How the engine runs, as opposed to what a request asks for.

    Attributes:
        blas: BLAS of MLX's CPU back end on Linux: "auto" takes OpenBLAS where installed.
        dtype: of dense weights and activations; "auto" keeps what is stored, but on a CPU takes fp32 for quantised
            weights, and for dense ones with OpenBLAS.
        acceptance: rejection rule of unseeded sampling: block verification or token by token.
        prefill_chunk: prompt tokens of one forward.
    """

    model_config = SettingsConfigDict(env_prefix="SELFDRAFT_", env_ignore_empty=True, extra="ignore", frozen=True)

    blas: Blas = "auto"
    dtype: Dtype = "auto"
    acceptance: Literal["block", "tokenwise"] = "block"
    prefill_chunk: int = Field(default=4096, ge=1, le=65536)


def load_settings(**given: object) -> Settings:
    """Settings from arguments and the environment.

    Raises:
        InvalidRequest: a value that is not allowed, with its name, the value and what is.
    """
    return checked(Settings, given)


def checked(kind: type[Kind], given: Mapping[str, Any]) -> Kind:
    """Settings of a kind; see `load_settings`. A field of secret text is not shown."""
    if unknown := given.keys() - kind.model_fields.keys():
        known = ", ".join(kind.model_fields)
        raise InvalidRequest(f"no setting {sorted(unknown)[0]!r}; there are {known}", param=sorted(unknown)[0])
    try:
        return kind(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise InvalidRequest(
            f"setting {name} (SELFDRAFT_{name.upper()}): {first['msg']}; got {first['input']!r}", param=name
        ) from error
