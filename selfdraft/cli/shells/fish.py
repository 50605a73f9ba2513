"""Completion for fish."""

from __future__ import annotations

from ..command_tree import Command, Option, Value

__all__ = ["fish"]

_START = """\
# Completion of selfdraft for fish.

function __selfdraft_at --description 'whether these words are the command so far'
    set --local path selfdraft
    for word in (commandline --tokenize --current-process --cut-at-cursor)[2..]
        switch "$path $word"
            case %(paths)s
                set path "$path $word"
        end
    end
    test "$path" = "$argv"
end

complete --command selfdraft --no-files
"""


def fish(tree: Command) -> str:
    """The script that completes this command line."""
    paths = " ".join(_quoted(" ".join(each.path)) for each in tree.walk() if each is not tree)
    lines = [line for command in tree.walk() for line in _lines(command)]
    return _START % {"paths": paths} + "\n".join(lines) + "\n"


def _lines(command: Command) -> list[str]:
    at = f"complete --command selfdraft --condition {_quoted('__selfdraft_at ' + ' '.join(command.path))}"
    lines = [f"{at} --arguments {each.path[-1]} --description {_quoted(each.summary)}" for each in command.commands]
    lines += [f"{at} {offer}" for each in command.arguments[:1] if (offer := _offer(each.value))]
    return lines + [f"{at} {_option(option)}" for option in command.options]


def _option(option: Option) -> str:
    parts = [_spelling(name) for name in option.names]
    if option.value is not None:
        parts += ["--require-parameter" if option.value.kind == "file" else "--exclusive", _offer(option.value)]
    return " ".join(filter(None, [*parts, "--description", _quoted(option.brief)]))


def _spelling(name: str) -> str:
    return f"--long-option {name[2:]}" if name.startswith("--") else f"--short-option {name[1:]}"


def _offer(value: Value) -> str:
    if value.kind == "choice":
        return f"--arguments {_quoted(' '.join(value.choices))}"
    return {
        "file": "--force-files",
        "folder": "--arguments '(__fish_complete_directories (commandline --current-token))'",
        "model": "--arguments 'reference (__fish_complete_directories (commandline --current-token))'",
        "text": "",
    }[value.kind]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
