"""`selfdraft serve`: the HTTP server in the foreground."""

from __future__ import annotations

import dataclasses
import logging
import logging.handlers
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..distributed.environment import answers_requests, started_in_group
from ..errors import InvalidRequest
from ..source import REFERENCE, find_model
from .command import command
from .flags import EngineFlags, SessionFlags, TraceFlags, flag, number, refusal, whole
from .group import GroupFlags, as_rank
from .image_flags import ImageFlags
from .retrieval_flags import RetrievalFlags
from .session import model_id, open_model
from .terminal import dim

if TYPE_CHECKING:
    from ..distributed.leading import Leader
    from ..llm import LLM
    from ..memory import Holdings
    from ..server.config import ServerSettings
    from ..server.registry import Given
    from ..server.served import ServedModel

__all__ = ["LogFlags", "ServeFlags", "serve", "serve_models"]

_WHERE = "Address and access"
_SEVERAL = "Several models"
_LIMITS = "Limits"
_MOST_LOGGED = 8 * 2**20  # bytes of a file


@dataclass(frozen=True, kw_only=True)
class ServeFlags(ImageFlags, RetrievalFlags):
    """A flag for every field of `ServerSettings` but the key itself, under the same name."""

    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="What to serve: 'reference' (bundled), a local folder or a Hugging Face id; NAME=MODEL gives it a "
            "name. The first is the default and loaded at once, others when they are asked for. Default: reference.",
            show_default=False,
        ),
    ] = None
    max_loaded_models: Annotated[
        int | None,
        flag(
            "--max-loaded-models",
            "How many may be loaded at once; the least recently used one gives way. Default: as many as fit.",
            _SEVERAL,
            "N",
            whole,
        ),
    ] = None
    idle_ttl: Annotated[
        str | None,
        flag(
            "--idle-ttl",
            "Time without a request after which a model is unloaded: seconds, or a span such as 5m; 0 for never. "
            "Default: 0.",
            _SEVERAL,
            "TIME",
        ),
    ] = None
    lazy: Annotated[
        bool | None,
        flag("--lazy", "Load the first model, too, when it is asked for. Default: at once.", _SEVERAL),
    ] = None
    host: Annotated[str | None, flag("--host", "Address to listen on. Default: 127.0.0.1.", _WHERE, "ADDRESS")] = None
    port: Annotated[
        int | None, flag("--port -p", "Port, 0 to 65535; 0 takes a free one. Default: 8000.", _WHERE, "PORT", whole)
    ] = None
    api_key_file: Annotated[
        Path | None,
        flag(
            "--api-key-file",
            "File with the keys of clients, one a line; made, with a new key, if it is not there. "
            "Or set $SELFDRAFT_API_KEY. Needed when --host is not loopback. Default: no key.",
            _WHERE,
            "FILE",
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        flag("--allowed-host", "Further name under which the server may be called; repeatable.", _WHERE, "NAME"),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        flag(
            "--cors-origin",
            "Origin whose web pages may call the server, as http://localhost:3000; repeatable. Default: none.",
            _WHERE,
            "ORIGIN",
        ),
    ] = None
    alias: Annotated[
        list[str] | None,
        flag("--alias", "Another name of a model, NAME=MODEL, or NAME for the first; repeatable.", _WHERE, "NAME"),
    ] = None
    strict_model: Annotated[
        bool | None,
        flag(
            "--strict-model",
            "Refuse requests for other model names. Without it a server on loopback takes any name for its model, if "
            "that is the only one.",
            _WHERE,
        ),
    ] = None
    ctx_size: Annotated[
        int | None,
        flag(
            "--ctx-size", "Most tokens of prompt and answer together. Default: the model's limit.", _LIMITS, "N", whole
        ),
    ] = None
    max_depth: Annotated[
        int | None,
        flag(
            "--max-depth",
            "Most tokens drafted a cycle; a request for more is refused. 0 is plain decoding. Default: the model's "
            "limit.",
            _LIMITS,
            "N",
            whole,
        ),
    ] = None
    rows: Annotated[
        int | None, flag("--rows", "Answers that run side by side, 1 to 256. Default: 16.", _LIMITS, "N", whole)
    ] = None
    queue: Annotated[
        int | None,
        flag("--queue", "Answers that wait for a place; beyond, 429. Default: 64.", _LIMITS, "N", whole),
    ] = None
    max_body: Annotated[
        int | None, flag("--max-body", "Most MiB of a request. Default: 32.", _LIMITS, "MIB", whole)
    ] = None
    keepalive: Annotated[
        float | None,
        flag(
            "--keepalive",
            "Seconds of silence before a comment is sent on a stream. Default: 3.",
            _LIMITS,
            "SECONDS",
            number,
        ),
    ] = None
    drain: Annotated[
        float | None,
        flag(
            "--drain", "Seconds that running answers may take after SIGTERM. Default: 30.", _LIMITS, "SECONDS", number
        ),
    ] = None

    def settings(self, engine: EngineFlags) -> ServerSettings:
        """Settings from these flags and the engine's, over the environment and settings.toml.

        Raises:
            typer.BadParameter: a value that is not allowed, under the flag's name.
            InvalidRequest: an environment variable, or a line of settings.toml, with such a value.
        """
        from ..server.config import load_server_settings

        given = {**dataclasses.asdict(self), **engine.given()}
        given = {name: value for name, value in given.items() if value not in (None, [])}
        try:
            settings = load_server_settings(**given)
            if answers_requests():
                settings.access()
        except InvalidRequest as error:
            if (error.param or "") not in given:
                raise
            raise refusal(error) from error
        return settings


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """What is logged, and where to."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        flag("--log-level", "debug, info, warning or error. Default: info.", "Log", "LEVEL"),
    ] = "info"
    log_file: Annotated[
        Path | None,
        flag(
            "--log-file",
            "File to append the log to; at 8 MiB it is renamed to FILE.1, that to FILE.2. Default: standard error.",
            "Log",
            "FILE",
        ),
    ] = None

    def apply(self) -> None:
        """Send the log where it should go.

        Raises:
            typer.BadParameter: the file cannot be written.
        """
        try:
            handler: logging.Handler = (
                logging.handlers.RotatingFileHandler(self.log_file, maxBytes=_MOST_LOGGED, backupCount=2)
                if self.log_file
                else logging.StreamHandler(sys.stderr)
            )
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="'--log-file'") from error
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        root.handlers[:] = [handler]
        root.setLevel(self.log_level.upper())
        logging.getLogger("httpx").setLevel("WARNING")


@dataclass(frozen=True, kw_only=True)
class _EngineFlags(SessionFlags):
    """How engines run; the model may stand without a flag."""

    model: Annotated[
        str, flag("--model -m", "The first model, in another way to give it.", "Model and engine", "NAME")
    ] = ""


@command
def serve(*, server: ServeFlags, log: LogFlags, engine: _EngineFlags, group: GroupFlags) -> None:
    """Serve models over HTTP.

    OpenAI's and Anthropic's APIs, a chat page at /, their description
    at /docs. Ctrl-C or SIGTERM lets running answers finish; a second
    one stops at once.
    """
    settings = server.settings(engine)
    models = [*filter(None, [engine.model]), *settings.models] or [REFERENCE]
    if group.asked:
        group.launch(sys.argv[1:], models, settings)
    elif backend := started_in_group():
        log.apply()
        as_rank(backend, models, settings, lambda leader: serve_models(models, settings, log, leader=leader))
    else:
        serve_models(models, settings, log)


def serve_models(
    models: Sequence[str],
    settings: ServerSettings,
    log: LogFlags,
    listening: Callable[[str], object] = lambda url: None,
    leader: Leader | None = None,
) -> None:
    """Serve until the user has enough; see `serve`.

    Args:
        models: each a model, or NAME=MODEL; the first is the default.
        listening: called with the server's URL once it answers; the model is still being loaded then.
        leader: of a group that shares the model, if one does.

    Raises:
        InvalidRequest: an adapter for more than one model.
        SelfdraftError: the address cannot be had; a model is not there; the first cannot be loaded.
    """
    from ..device import choose_blas

    if settings.adapter_path is not None and len(models) > 1:
        raise InvalidRequest(
            f"the adapter {settings.adapter_path} is for one model, and {len(models)} are given: serve that one alone",
            param="adapter_path",
        )

    choose_blas(settings.blas)  # before MLX comes in
    log.apply()
    from ..server.instance import local_url, noted
    from ..server.registry import Given
    from ..server.run import Server, bind

    chosen = list(dict.fromkeys(Given.parse(model) for model in models))
    first = chosen[0]
    served = [_served(model, settings, leader, first=model is first) for model in chosen]
    with closing(bind(settings.host, settings.port)) as listener:
        port = listener.getsockname()[1]
        url = local_url(settings.host, port)

        def started() -> None:
            rest = f"{first.source} is loaded when it is asked for" if settings.lazy else f"loading {first.source} ..."
            dim(f"listening on {url} (chat page at /, API at /v1, description at /docs); {rest}")
            listening(url)

        server = Server(settings, served, listener, started)
        server.models.on_failure = server.stop
        if leader:
            leader.lost = server.fail
        with noted(settings.host, port, model_id(first.source)):
            server.run()


def _served(model: Given, settings: ServerSettings, leader: Leader | None, *, first: bool) -> ServedModel:
    """A model to serve. All but the first must be on this machine, so that no request downloads one.

    Raises:
        ModelNotFound: it is not.
    """
    from ..opening import weight_bytes
    from ..server.served import ServedModel

    if not first:
        find_model(model.source, fetch=False)

    def weights() -> int:
        return weight_bytes(find_model(model.source, fetch=first), settings) // (leader.group.size if leader else 1)

    def load(beside: Callable[[], Holdings]) -> LLM:
        given = leader.adapted(settings) if leader else settings
        llm = open_model(EngineFlags(model=model.source), TraceFlags(), given, beside=beside, leader=leader)
        if llm.max_mode is not None:
            llm.max_mode.warn = logging.getLogger(__name__).warning
        if settings.ctx_size is not None:
            llm.limit_context(settings.ctx_size)
        if settings.max_depth is not None:
            llm.limit_depth(settings.max_depth)
        return llm

    if leader is None:
        return ServedModel(model, weights, load)
    return ServedModel(model, weights, load, leader.beyond_repair, pinned=True)  # ranks load their parts once
