"""How the server runs: its settings, beside the engine's. Knows names and ranges; opens the key file alone."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from ..errors import InvalidRequest
from ..images import MEGAPIXEL, ImageLimits
from ..settings import Settings, checked
from .durations import seconds
from .instance import local_url
from .security import Access, allowed_hosts, is_loopback

__all__ = ["ServerSettings", "load_server_settings"]

_MIB = 2**20

Names = Annotated[tuple[str, ...], NoDecode]  # in the environment: separated by commas


class ServerSettings(Settings):
    """Settings of `selfdraft serve`, and the engine's; see `Settings`. In settings.toml they stand under [server].

    Attributes:
        host: address on which the server listens.
        port: port on which it listens; 0 takes a free one.
        api_key: what callers must present; from the environment or a file, never from the command line.
        api_key_file: a file that holds keys, one a line, readable by its owner alone.
        allowed_host: further names under which the server may be called.
        cors_origin: origins whose web pages may call the server.
        models: further models, which are loaded when they are asked for; each a model, or NAME=MODEL.
        max_loaded_models: how many may be loaded at once; None for as many as fit.
        idle_ttl: seconds, or a span such as 5m, without a request after which a model is unloaded; 0 is never.
        lazy: load the first model, too, when it is asked for.
        alias: other names of a model, NAME=MODEL, or NAME for the first one.
        embedding_model: models that embed, NAME=MODEL or MODEL, loaded on request.
        rerank_model: models that score documents, likewise.
        max_loaded_retrieval: how many of those are loaded at once.
        strict_model: refuse names that are neither the model's, nor an alias, nor "default"; of several models, such
            names are always refused.
        ctx_size: most tokens of prompt and answer together; None is the model's own limit.
        max_depth: most tokens drafted a cycle; 0 is plain decoding, None the model's own limit.
        rows: answers that run side by side.
        queue: answers that wait for a place.
        max_body: most MiB of a request.
        max_images: most images of a request, all its messages counted.
        max_image_file: most MiB of an image's file.
        max_image_pixels: most megapixels of an image.
        max_request_pixels: most megapixels of all images of a request together.
        remote_images: fetch images that a request names by a public http or https address.
        keepalive: seconds of silence before a comment is sent on a stream.
        drain: seconds that running answers may take after SIGTERM.
    """

    tables: ClassVar[tuple[str, ...]] = ("", "server")
    unstored: ClassVar[Mapping[str, str]] = {
        **Settings.unstored,
        "api_key": "set SELFDRAFT_API_KEY, or name a file that holds the key as api_key_file",
    }

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    allowed_host: Names = ()
    cors_origin: Names = ()
    models: Names = ()
    max_loaded_models: int | None = Field(default=None, ge=1)
    idle_ttl: float = Field(default=0.0, ge=0)
    lazy: bool = False
    alias: Names = ()
    embedding_model: Names = ()
    rerank_model: Names = ()
    max_loaded_retrieval: int = Field(default=4, ge=1, le=256)
    strict_model: bool = False
    ctx_size: int | None = Field(default=None, ge=16)
    max_depth: int | None = Field(default=None, ge=0)
    rows: int = Field(default=16, ge=1, le=256)
    queue: int = Field(default=64, ge=0, le=4096)
    max_body: int = Field(default=32, ge=1, le=1024)
    max_images: int = Field(default=64, ge=0, le=1024)
    max_image_file: int = Field(default=20, ge=1, le=1024)
    max_image_pixels: int = Field(default=50, ge=1, le=1000)
    max_request_pixels: int = Field(default=200, ge=1, le=10000)
    remote_images: bool = False
    keepalive: float = Field(default=3.0, gt=0, le=60)
    drain: float = Field(default=30.0, ge=0, le=3600)

    @field_validator("idle_ttl", mode="before")
    @classmethod
    def _span(cls, span: object) -> object:
        return seconds(span) if isinstance(span, str) else span

    @field_validator("allowed_host", "cors_origin", "alias", "models", "embedding_model", "rerank_model", mode="before")
    @classmethod
    def _separate(cls, names: object) -> object:
        return tuple(name.strip() for name in names.split(",") if name.strip()) if isinstance(names, str) else names

    @field_validator("cors_origin")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2 or "*" in origin:
                raise ValueError(f"{origin!r} is no origin: give scheme, host and port, as in http://localhost:3000")
        return origins

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        return local_url(self.host, self.port)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    def image_limits(self) -> ImageLimits:
        """How large one image may be."""
        return ImageLimits(self.max_image_file * _MIB, self.max_image_pixels * MEGAPIXEL)

    def access(self) -> Access:
        """The rules of the gate.

        Raises:
            InvalidRequest: reachable from elsewhere and without a key; a key file that others can read.
        """
        keys = self.keys()
        if not self.loopback and not keys:
            raise InvalidRequest(
                f"--host {self.host} can be reached from other machines, so it needs an API key: set SELFDRAFT_API_KEY "
                "or give --api-key-file FILE (made with a new key if it does not exist)",
                param="host",
            )
        anywhere = self.host in ("0.0.0.0", "::", "")
        hosts = allowed_hosts((*self.allowed_host, *(() if anywhere else (self.host,))))
        return Access(hosts, anywhere, frozenset(self.cors_origin), keys, self.max_body * _MIB)

    def key(self) -> str | None:
        """The first of the API keys, for programs of this machine's user."""
        return next(iter(self.keys()), None)

    def keys(self) -> tuple[str, ...]:
        """The API keys; a key file that does not exist is made, with a new key, for its owner alone."""
        if self.api_key_file is None:
            return (_checked_key(self.api_key.get_secret_value(), "SELFDRAFT_API_KEY"),) if self.api_key else ()
        path = self.api_key_file.expanduser()
        try:
            if not path.exists():
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(f"sd-{secrets.token_urlsafe(32)}\n")
            if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise InvalidRequest(f"{path} can be read by others: chmod 600 {path}", param="api_key_file")
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"the key file {path} cannot be used: {error}", param="api_key_file") from error
        keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        return tuple(_checked_key(key, str(path)) for key in keys or [""])


def _checked_key(key: str, origin: str) -> str:
    if len(key) < 16 or not key.isascii() or not key.isprintable():
        raise InvalidRequest(f"the key in {origin} must be at least 16 printable ASCII characters", param="api_key")
    return key


def load_server_settings(**given: object) -> ServerSettings:
    """The server's settings, and the engine's.

    Raises:
        InvalidRequest: a value that is not allowed, with where it comes from, the value and what is.
    """
    return checked(ServerSettings, given)
