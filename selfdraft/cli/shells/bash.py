"""Completion for bash, from 3.2 (which macOS has) on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from shlex import quote

from ..command_tree import Command, Value

__all__ = ["bash"]

_FRAME = """\
# Completion of selfdraft for bash.

_selfdraft_words() {
    COMPREPLY+=($(compgen -W "$1" -- "$current"))
}

_selfdraft_paths() { # -f: files, -d: folders
    local path
    compopt -o filenames 2>/dev/null # bash 3.2 has none
    while IFS= read -r path; do COMPREPLY+=("$path"); done < <(compgen "$1" -- "$current")
}

_selfdraft_value() { # $1: the words of a command and of its option, if any
    case "$1" in
%(values)s
    *) return 1 ;;
    esac
}

_selfdraft_options() {
    case "$1" in
%(options)s
    esac
}

_selfdraft_command() {
    case "$1" in
%(groups)s
    *) return 1 ;;
    esac
}

_selfdraft() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} path=selfdraft word
    COMPREPLY=()
    # --option=value comes as three words
    if [ "$current" = = ]; then
        current=
    elif [ "$before" = = ]; then
        before=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$path $word" in
        %(paths)s) path="$path $word" ;;
        esac
    done
    case "$before" in
    -*) _selfdraft_value "$path $before" && return ;;
    esac
    case "$current" in
    -*) _selfdraft_options "$path" ;;
    *) _selfdraft_command "$path" || _selfdraft_value "$path" ;;
    esac
    return 0
}

complete -F _selfdraft selfdraft
"""


def bash(tree: Command) -> str:
    """The script that completes this command line."""
    commands = list(tree.walk())
    return _FRAME % {
        "values": _cases(_values(commands)),
        "options": _cases((_path(each), _words(_spellings(each))) for each in commands),
        "groups": _cases(
            (_path(each), _words(below.path[-1] for below in each.commands)) for each in commands if each.commands
        ),
        "paths": " | ".join(quote(_path(each)) for each in commands if each is not tree),
    }


def _path(command: Command) -> str:
    return " ".join(command.path)


def _spellings(command: Command) -> list[str]:
    return [name for option in command.options for name in option.names]


def _values(commands: Iterable[Command]) -> Iterator[tuple[str, str]]:
    for command in commands:
        for option in command.options:
            if option.value is not None:
                for name in option.names:
                    yield f"{_path(command)} {name}", _offer(option.value)
        for argument in command.arguments[:1]:
            yield _path(command), _offer(argument.value)


def _offer(value: Value) -> str:
    if value.kind == "choice":
        return _words(value.choices)
    if value.kind == "model":
        return f"{_words(['reference'])}; _selfdraft_paths -d"
    return {"file": "_selfdraft_paths -f", "folder": "_selfdraft_paths -d", "text": ":"}[value.kind]


def _words(words: Iterable[str]) -> str:
    return f"_selfdraft_words {quote(' '.join(words))}"


def _cases(pairs: Iterable[tuple[str, str]]) -> str:
    """Branches of a `case`, those with the same body together."""
    patterns: dict[str, list[str]] = {}
    for pattern, body in pairs:
        patterns.setdefault(body, []).append(quote(pattern))
    return "\n".join(f"    {' | '.join(found)}) {body} ;;" for body, found in patterns.items())
