"""`selfdraft start`: the one command for trying out. Puts `chat`, `serve` and a server that runs already together."""

from __future__ import annotations

import os
import sys
import threading
import time
import webbrowser
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..errors import SelfdraftError
from ..params import SamplingParams
from .chat import chat_here, converse
from .command import command
from .flags import AdapterPath, ChatFlags, EngineFlags, TraceFlags, flag, whole
from .serve import LogFlags, ServeFlags, serve_models
from .session import is_terminal, model_id
from .terminal import dim, say

if TYPE_CHECKING:
    from ..server.config import ServerSettings
    from ..server.instance import Instance
    from .wizard import StartSettings

__all__ = ["StartFlags", "start"]

_RESTART = "`selfdraft stop` it and start again"


@dataclass(frozen=True, kw_only=True)
class StartFlags:
    """What to start: a flag for every field of `StartSettings`, where the server listens, and the engine's mode."""

    model: Annotated[
        str | None,
        flag(
            "--model -m",
            "'reference' (bundled), a local folder, or a Hugging Face id. Default: what was chosen last, else "
            "reference.",
            metavar="NAME",
        ),
    ] = None
    drafting: Annotated[
        Literal["auto", "off"] | None,
        flag(
            "--drafting",
            "auto: the MTP head drafts, as deep as pays off; off: plain decoding. Default: what was chosen last, else "
            "auto.",
            metavar="MODE",
        ),
    ] = None
    browser: Annotated[
        bool | None,
        flag(
            "--browser/--terminal",
            "Talk on a chat page, for which a server is started, or here. Default: what was chosen last, else here.",
        ),
    ] = None
    host: Annotated[str | None, flag("--host", "Address of the server. Default: 127.0.0.1.", metavar="ADDRESS")] = None
    port: Annotated[
        int | None, flag("--port -p", "Port of the server. Default: 8000.", metavar="PORT", parser=whole)
    ] = None
    mode: Annotated[
        Literal["auto", "turbo", "sustained", "max"] | None,
        flag(
            "--mode",
            "How memory for a context is set aside; see `selfdraft run --help`. max: sustained, with a Mac's fans at "
            "maximum meanwhile (needs ThermalForge). Default: $SELFDRAFT_MODE, else auto.",
            metavar="MODE",
        ),
    ] = None
    adapter_path: AdapterPath = None

    @property
    def choice(self) -> dict[str, str | None]:
        """What was chosen here, by the names of `StartSettings`; None where nothing was."""
        surface = None if self.browser is None else ("browser" if self.browser else "terminal")
        return {"model": self.model, "drafting": self.drafting, "surface": surface}


@command
def start(
    *,
    flags: StartFlags,
    setup: Annotated[bool, flag("--setup", "Ask everything again. Default: only the first time.")] = False,
) -> None:
    """Talk with a model: here or in a browser.

    The first time it asks which model, how it decodes and where to talk,
    and remembers that in settings.toml; after that Enter starts the same.
    In a pipe it asks nothing: each line is a message. A server that runs
    on this machine already is used, so no model is loaded twice. Every
    other setting comes from settings.toml and the environment.
    """
    from ..server.instance import find

    given: dict[str, Any] = {"mode": flags.mode, "adapter_path": flags.adapter_path}
    settings = ServeFlags(host=flags.host, port=flags.port).settings(EngineFlags(**given))
    choice = _choice(flags.choice, settings, setup=setup)
    if choice is None:
        return
    engine = EngineFlags(model=choice.model, **given)
    running = find()
    if running is not None:
        for name in (name for name, value in given.items() if value is not None):
            flag_name = name.replace("_", "-")
            say(f"--{flag_name} is for what is started now: the server that runs keeps its own; {_RESTART}")
        _attach(running, choice, settings)
    elif choice.surface == "browser":
        if choice.drafting == "off":
            settings = settings.model_copy(update={"max_depth": 0})
        serve_models([choice.model, *settings.models], settings, LogFlags(log_level="warning"), _show_when_ready)
    else:
        chat_here(engine, _params(choice), ChatFlags(), TraceFlags())


def _choice(given: dict[str, str | None], settings: ServerSettings, *, setup: bool) -> StartSettings | None:
    """What to start: from the flags, from last time, or asked now; None if the user wants nothing after all."""
    from ..device import choose_blas
    from ..settings import checked
    from .wizard import StartSettings, ask, one_key

    choice = checked(StartSettings, given)
    if not (is_terminal("stdin") and is_terminal("stdout")):
        # Nobody is there to see a browser, unless it was asked for.
        return choice if given["surface"] else choice.model_copy(update={"surface": "terminal"})
    if any(given.values()) and not setup:
        return choice
    if choice.model_fields_set and not setup:
        drafting = "" if choice.drafting == "auto" else ", without drafting"
        print(f"{choice.model}{drafting}, in the {choice.surface} · Enter starts it, s sets up anew, q leaves ", end="")
        sys.stdout.flush()
        key = one_key()
        print()
        if key not in ("s", "S"):
            return choice if key == "\n" else None
    choose_blas(settings.blas)  # before MLX comes in, to look at models
    try:
        choice = ask(choice, settings, settings.url)
    except EOFError:
        print()
        return None
    _keep(choice)
    return choice


def _keep(choice: StartSettings) -> None:
    from ..settings import remember

    try:
        path = remember("start", choice.model_dump())
    except OSError as error:
        say(f"this is not remembered: {error.filename}: {error.strerror}")
        return
    dim(f"remembered in {path}; `selfdraft start --setup` asks again\n")


def _params(choice: StartSettings) -> SamplingParams:
    return SamplingParams(depth=0 if choice.drafting == "off" else "auto")


def _attach(running: Instance, choice: StartSettings, settings: ServerSettings) -> None:
    """Use the server that runs.

    Raises:
        SelfdraftError: it has another model, or none.
    """
    from .remote import RemoteConversation
    from .server_client import is_served, served_model

    key = settings.key()
    name = None if model_id(choice.model) == running.model else choice.model
    if name is not None and not is_served(running.url, key, name):
        raise SelfdraftError(
            f"a server runs already at {running.url}, with {running.model} and not {choice.model}: `selfdraft stop` "
            f"ends it; `selfdraft start --model {running.model}` talks with it"
        )
    dim(f"a server with {name or running.model} runs already at {running.url}: no second one is started")
    if choice.surface == "browser":
        if choice.drafting == "off":
            say(f"it keeps its own drafting: set the depth on the page, or {_RESTART}")
        _show_when_ready(running.url).join()
        return
    _wait(running.url)
    converse(RemoteConversation(running.url, served_model(running.url, key, name), _params(choice), key=key))


def _show_when_ready(url: str) -> threading.Thread:
    """Open the chat page as soon as the model is there, without keeping anybody waiting."""

    def show() -> None:
        try:
            _wait(url)
        except SelfdraftError:  # whoever loads the model says so
            return
        opened = _has_display() and webbrowser.open(url)
        dim(f"ready: {url} {'opens in your browser' if opened else 'is the chat page'}")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    return thread


def _wait(url: str) -> None:
    """Wait until the server has its model.

    Raises:
        SelfdraftError: it will not have one.
    """
    from .server_client import health

    while (state := health(url))["status"] == "loading":
        time.sleep(0.2)
    if state["status"] != "ok":
        why = state.get("error", "nothing answers there")
        raise SelfdraftError(f"the server at {url} cannot be used ({why}): `selfdraft stop`, then start again")


def _has_display() -> bool:
    """Whether a browser could open a window; one that runs in the terminal would only be in the way."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
