"""Taking out of texts what is nobody's business: names of the user and the machine, keys and tokens, what was said."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["SECRET_NAME", "Redactor", "log_without_texts"]

SECRET_NAME = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)

_LEAST, _LEAST_OF_ENVIRONMENT = 4, 8  # characters of a secret: shorter ones would take words apart

# Keys and tokens by their looks, wherever they come from.
_LOOKS = re.compile(
    r"\b(?:sd|sk|pk|hf|gh[opsu]|github_pat|xox[abp]|AKIA)[-_]?[A-Za-z0-9_-]{16,}"
    r"|(?<=Bearer )\S+|\beyJ[A-Za-z0-9_.-]{20,}"
)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
_HOMES = re.compile(r"(?<=/home/)[^/\s:;,'\"]+|(?<=/Users/)[^/\s:;,'\"]+")

_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.]+: ")
_TRACEBACK = re.compile(r'Traceback \(|  File "[^"]*", line \d+')
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt)\b")
# From the first quote that opens one to the last of the line: what is in between may be a user's words.
_QUOTED = re.compile(r"""(?<!\w)[bru]{0,2}["'`“‘].*["'`”’]|(?<!\w)[bru]{0,2}["'`“‘].*""")


class Redactor:
    """Takes them out of texts.

    Args:
        secrets: texts that must not be seen, beside those of the environment.
        hosts: names of machines, beside this one's.
    """

    def __init__(self, secrets: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        environment = (value for name, value in os.environ.items() if SECRET_NAME.search(name))
        hidden = {each for each in environment if len(each) >= _LEAST_OF_ENVIRONMENT}
        hidden |= {each for each in secrets if len(each) >= _LEAST}
        # The longest first: one may be a part of another.
        self._literal = [(each, "<secret>") for each in sorted(hidden, key=len, reverse=True)]
        self._literal += [(each, "~") for each in sorted(_homes(), key=len, reverse=True)]
        named = sorted({*_hosts(), *filter(None, hosts)}, key=len, reverse=True)
        self._names = [(_word(each), "<host>") for each in named]
        self._names += [(_word(each), "<user>") for each in _users()]

    def text(self, text: str) -> str:
        """A text without them."""
        for literal, instead in self._literal:
            text = text.replace(literal, instead)
        text = _EMAIL.sub("<email>", _LOOKS.sub("<secret>", text))
        for name, instead in self._names:
            text = name.sub(instead, text)
        return _HOMES.sub("<user>", text)

    def tree(self, value: Any) -> Any:
        """JSON values without them; keys of objects, too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.tree(key): self.tree(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(each) for each in value]
        return value


def log_without_texts(log: str) -> str:
    """Lines of a log without what users wrote: of its own lines and of tracebacks all but what stands in quotes, and of
    other lines, which may be anything, nothing."""
    kept: list[str] = []
    dropped = 0
    for line in [*log.splitlines(), None]:
        shown = None if line is None else _shown(line)
        if shown is None and line is not None:
            dropped += 1
            continue
        if dropped:
            kept.append(f"[{dropped} line{'s' if dropped > 1 else ''} left out]")
            dropped = 0
        if shown is not None:
            kept.append(shown)
    return "".join(f"{line}\n" for line in kept)


def _shown(line: str) -> str | None:
    if _TRACEBACK.match(line):
        return line
    if own := _LOG_LINE.match(line):
        return own[0] + _QUOTED.sub("<text>", line[own.end() :])
    if error := _ERROR.match(line):
        return f"{error[0]}: <text>" if ":" in line else error[0]
    return None


def _homes() -> set[str]:
    homes = {str(Path.home()), str(Path.home().resolve()), os.environ.get("HOME", "")}
    return {each for each in homes if len(each) > 1}


def _users() -> set[str]:
    names = {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), Path.home().name}
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        names.add(getpass.getuser())
    return {each for each in names if each}


def _hosts() -> set[str]:
    names = {socket.gethostname(), platform.node(), os.environ.get("HOSTNAME", "")}
    names |= {name.partition(".")[0] for name in names}
    return {each for each in names if each and each != "localhost"}


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE)
