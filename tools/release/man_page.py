"""selfdraft(1) in man(7) macros, of the command tree and the list of settings. Writes no file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from selfdraft import __version__
from selfdraft.cli.app import app
from selfdraft.cli.command_tree import Argument, Command, Option, command_tree
from selfdraft.cli.settings import kinds
from selfdraft.settings_list import Setting, list_settings

__all__ = ["man_page"]

_EXIT_STATUS = (
    ("0", "Done."),
    ("1", "An error, said in one line on standard error; or the answer of a check is no."),
    ("2", "Wrong usage."),
    ("130", "Stopped by Ctrl-C."),
    ("141", "The reader of standard output went away."),
)
_FILES = (
    ("settings.toml", "Settings, in the user's configuration folder or in $SELFDRAFT_CONFIG_DIR."),
    ("the user's cache folder", "Warm prefixes of past conversations; see selfdraft cache."),
    ("the Hugging Face cache", "Models that were pulled; see selfdraft models and selfdraft remove."),
)
_EXAMPLES = (
    ("Ask the model that is bundled:", 'selfdraft run "What is the capital of Japan?"'),
    ("Talk with a model of your own:", "selfdraft chat --model ~/models/Qwen3.6-27B-4bit"),
    ("Serve it to other programs:", "selfdraft serve --model ~/models/Qwen3.6-27B-4bit --port 8000"),
)


def man_page(date: str) -> str:
    """The page.

    Args:
        date: YYYY-MM-DD, when its text last changed.
    """
    tree = command_tree(app)
    return "\n".join([*_head(tree, date), *_commands(tree), *_tail()]) + "\n"


def _head(tree: Command, date: str) -> list[str]:
    summary = tree.summary[0].lower() + tree.summary[1:].removesuffix(".")
    return [
        f'.TH SELFDRAFT 1 {date} "selfdraft {__version__}" "User Commands"',
        ".nh",
        ".ad l",
        ".SH NAME",
        *_lines(rf"selfdraft \- {_text(summary)}"),
        ".SH SYNOPSIS",
        ".B selfdraft",
        r".I command",
        r"[\fIoptions\fR] [\fIarguments\fR]",
        ".SH DESCRIPTION",
        *_paragraphs(
            "Language models that ship a multi-token-prediction head draft for themselves: the head drafts some "
            "tokens, one forward pass of the model checks them, and rejection sampling keeps what plain decoding "
            "could have produced. The output distribution is the model's own, at any temperature."
        ),
        ".PP",
        "Options of the program itself:",
        *_options(tree.options),
    ]


def _commands(tree: Command) -> Iterator[str]:
    yield ".SH COMMANDS"
    for command in tree.walk():
        if command is tree or command.commands:
            continue
        words = " ".join(command.path)
        yield f'.SS "{_text(" ".join([words, "[options]", *map(_placed, command.arguments)]))}"'
        yield from _paragraphs(command.text)
        for argument in command.arguments:
            yield from [".TP", rf"\fI{_text(argument.value.name)}\fR", *_words(argument.help)]
        yield from _options(option for option in command.options if "--help" not in option.names)


def _tail() -> Iterator[str]:
    yield ".SH ENVIRONMENT"
    yield "Flags win over these, and these over settings.toml."
    for setting in list_settings(kinds()):
        yield from [".TP", rf"\fB{_text(setting.variable)}\fR", *_words(_meaning(setting))]
    yield ".SH FILES"
    for name, meaning in _FILES:
        yield from [".TP", rf"\fI{_text(name)}\fR", *_words(meaning)]
    yield ".SH EXIT STATUS"
    for code, meaning in _EXIT_STATUS:
        yield from [".TP", rf"\fB{code}\fR", *_words(meaning)]
    yield ".SH EXAMPLES"
    for number, (what, line) in enumerate(_EXAMPLES):
        yield from [*([".PP"] if number else []), *_words(what), ".PP", ".RS", ".nf", _text(line), ".fi", ".RE"]


def _meaning(setting: Setting) -> str:
    meaning = setting.meaning
    return meaning[:1].upper() + meaning[1:]


def _options(options: Iterable[Option]) -> Iterator[str]:
    for option in options:
        names = ", ".join(rf"\fB{_text(name)}\fR" for name in option.names)
        value = rf" \fI{_text(option.value.name)}\fR" if option.value else ""
        yield from [".TP", names + value, *_words(option.help)]


def _placed(argument: Argument) -> str:
    name = argument.value.name + ("..." if argument.many else "")
    return name if argument.required else f"[{name}]"


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        yield from _words(paragraph)


def _words(text: str) -> list[str]:
    return _lines(_text(" ".join(text.split())))


def _lines(escaped: str) -> list[str]:
    """Lines of input, none of which is taken for a request because it begins with a dot or an apostrophe."""
    lines = textwrap.wrap(escaped, 76, break_long_words=False, break_on_hyphens=False)
    return [rf"\&{line}" if line.startswith(".") else line for line in lines]


def _text(text: str) -> str:
    """As roff takes it: a plain - would be typeset as a hyphen, a ' as a quotation mark."""
    for plain, escape in (("\\", r"\e"), ("-", r"\-"), ("'", r"\(aq"), ('"', r"\(dq"), ("~", r"\(ti"), ("^", r"\(ha")):
        text = text.replace(plain, escape)
    return text
