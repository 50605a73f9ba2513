"""What `selfdraft start` asks, once: which model, how it decodes, where to talk. Knows the terminal; starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic_settings import SettingsConfigDict

from .. import __version__
from ..errors import ModelNotFound
from ..settings import Settings, StoredSettings
from ..source import find_model
from .found_models import FoundModel, find_models, gigabytes
from .terminal import dim, say

__all__ = ["StartSettings", "ask", "one_key"]


class StartSettings(StoredSettings):
    """What `selfdraft start` starts; the table [start] of settings.toml, SELFDRAFT_START_* in the environment.

    Attributes:
        model: its name, as `--model` takes it.
        drafting: "auto" drafts as deep as pays off; "off" is plain decoding.
        surface: where to talk with it.
    """

    model_config = SettingsConfigDict(env_prefix="SELFDRAFT_START_")
    tables: ClassVar[tuple[str, ...]] = ("start",)

    model: str = "reference"
    drafting: Literal["auto", "off"] = "auto"
    surface: Literal["browser", "terminal"] = "terminal"


def ask(before: StartSettings, settings: Settings, url: str) -> StartSettings:
    """Ask everything.

    Args:
        before: what Enter takes.
        settings: of the engine.
        url: where a browser would find the server.

    Raises:
        EOFError: the user closed the input instead of answering.
    """
    print(f"selfdraft {__version__} · three questions; Enter takes the answer in brackets")
    dim("looking for models ...")
    found = find_models(settings)
    model = _ask_model(before.model, found, settings)
    drafting, surface = before.drafting, before.surface
    known = next((each for each in found if each.name == model), None)
    if known is not None and known.head:
        print(f"\nIt will decode plainly: {known.head}")
    else:
        _heading("How should it decode?")
        _option(1, "auto", "its MTP head drafts, as deep as pays off on this machine")
        _option(2, "off", "plain decoding, a token at a time")
        drafting = ("auto", "off")[_number("drafting", 2, 1 + (drafting == "off")) - 1]
    _heading("Where do you want to talk with it?")
    _option(1, "terminal", "a chat right here")
    _option(2, "browser", f"a chat page, and the OpenAI and Anthropic APIs, on {url}")
    surface = ("terminal", "browser")[_number("where", 2, 1 + (surface == "browser")) - 1]
    return StartSettings(model=model, drafting=drafting, surface=surface)


def one_key() -> str:
    """The next key, without Enter behind it; "" at the end of input.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        key = os.read(descriptor, 1).decode("ascii", "replace")
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
    return "" if key == "\x04" else key.replace("\r", "\n")


def _ask_model(before: str, found: Sequence[FoundModel], settings: Settings) -> str:
    from ..memory import free_memory

    free = settings.memory_limit or free_memory()
    usable = [each for each in found if not each.problem]
    _heading("Which model?")
    for number, each in enumerate(usable, 1):
        fits = "fits" if each.memory <= free else "TOO BIG"
        head = "no MTP head" if each.head else "MTP head"
        room = f"needs {gigabytes(each.memory)} of {gigabytes(free)} free"
        _option(number, _short(each.name))
        print(f"       {gigabytes(each.disk)} on disk · {head} · {fits}: {room}")
    for each in found:
        if each.problem:
            dim(f"     cannot run: {_short(each.name)}: {each.problem}")
    names = [each.name for each in usable]
    default = str(names.index(before) + 1) if before in names else before
    while True:
        answer = input(f"number, a folder, or OWNER/NAME of Hugging Face [{default}]: ").strip()
        name = answer or default
        if name.isdecimal():
            if 1 <= int(name) <= len(names):
                return names[int(name) - 1]
            say(f"{name} is not on the list; choose 1 to {len(names)}, or write a name")
        elif _exists(name):
            return name


def _exists(name: str) -> bool:
    """Whether a name can be loaded, as far as can be said without fetching anything; if not, it is said why."""
    if Path(name).expanduser().exists() or "/" not in name or name.startswith(("/", ".", "~")):
        try:
            find_model(name)
        except ModelNotFound as error:
            say(str(error))
            return False
    return True


def _number(what: str, most: int, default: int) -> int:
    while True:
        answer = input(f"{what} [{default}]: ").strip() or str(default)
        if answer.isdecimal() and 1 <= int(answer) <= most:
            return int(answer)
        say(f"{answer!r} is not on the list; choose 1 to {most}")


def _heading(text: str) -> None:
    print(f"\n{text}")


def _option(number: int, name: str, meaning: str = "") -> None:
    print(f"  {number:>2}  {name:<10} {meaning}".rstrip())


def _short(name: str) -> str:
    """A path as people write it."""
    home = str(Path.home())
    return f"~{name[len(home) :]}" if name.startswith(f"{home}/") else name
