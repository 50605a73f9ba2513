"""Completion for zsh: a function for each command, found under the name _selfdraft on the $fpath."""

from __future__ import annotations

from shlex import quote

from ..command_tree import Argument, Command, Option, Value

__all__ = ["zsh"]

_START = """\
#compdef selfdraft
# Completion of selfdraft for zsh.

__selfdraft_model() {
    _alternative 'models:model:(reference)' 'folders:folder:_files -/'
}
"""

_GROUP = """
%(function)s() {
    local -a line commands=(%(commands)s)
    local state
    _arguments -C %(options)s '1: :->command' '*:: :->rest'
    case $state in
    command) _describe command commands ;;
    rest)
        case $line[1] in
%(cases)s
        esac ;;
    esac
}
"""

_LEAF = """
%(function)s() {
    _arguments -s -S %(specifications)s
}
"""

_END = """
_selfdraft "$@"
"""


def zsh(tree: Command) -> str:
    """The script that completes this command line."""
    return _START + "".join(map(_function, tree.walk())) + _END


def _name(command: Command) -> str:
    return "_" + "_".join(command.path)


def _function(command: Command) -> str:
    options = [_option(option) for option in command.options]
    if not command.commands:
        specifications = options + [_argument(each) for each in command.arguments]
        return _LEAF % {"function": _name(command), "specifications": " ".join(specifications)}
    return _GROUP % {
        "function": _name(command),
        "options": " ".join(options),
        "commands": " ".join(quote(f"{each.path[-1]}:{each.summary}") for each in command.commands),
        "cases": "\n".join(f"        {each.path[-1]}) {_name(each)} ;;" for each in command.commands),
    }


def _option(option: Option) -> str:
    """As _arguments wants it: which spellings exclude it, the spellings, the help and, if there is one, the value."""
    rest = quote(f"[{_escaped(option.brief, '[]')}]{_value(option.value) if option.value else ''}")
    names = [_spelling(name, option.value is not None) for name in option.names]
    spelt = "{" + ",".join(names) + "}" if len(names) > 1 else names[0]
    exclude = "'*'" if option.repeatable else quote(f"({' '.join(option.names)})")
    return f"{exclude}{spelt}{rest}"


def _spelling(name: str, valued: bool) -> str:
    """With how its value may follow: after = if it is long, at once if it is short, and always as the next word."""
    if not valued:
        return name
    return f"{name}=" if name.startswith("--") else f"{name}+"


def _argument(argument: Argument) -> str:
    return quote(f"{'*' if argument.many else ''}{_value(argument.value)}")


def _value(value: Value) -> str:
    return f":{_escaped(value.name, ':')}:{_action(value)}"


def _action(value: Value) -> str:
    if value.kind == "choice":
        return f"({' '.join(value.choices)})"
    return {"file": "_files", "folder": "_files -/", "model": "__selfdraft_model", "text": "()"}[value.kind]


def _escaped(text: str, special: str) -> str:
    return "".join(f"\\{letter}" if letter in special + "\\" else letter for letter in text)
