"""The commands of a chat, each a function of the conversation and what stands behind the command's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InvalidRequest
from .conversation import Conversation
from .figures import Tally
from .image_files import named_files
from .sampling_flags import parse_depth

__all__ = ["Leave", "depth_now", "obey"]

Handler = Callable[[Conversation, str], str]


class Leave(Exception):
    """The user wants to leave the chat."""


@dataclass(frozen=True)
class _Command:
    usage: str
    help: str
    handler: Handler


def obey(conversation: Conversation, line: str) -> str:
    """Carry out a line that begins with a slash.

    Returns:
        What to show.

    Raises:
        Leave: the line was /quit.
    """
    name, _, argument = line.partition(" ")
    command = _COMMANDS.get(name)
    if command is None:
        return f"no command {name!r}; /help lists them. To send it as a message, put a space first"
    try:
        return command.handler(conversation, argument.strip())
    except InvalidRequest as error:
        return f"{error}; usage: {command.usage}"


def _help(conversation: Conversation, argument: str) -> str:
    width = max(len(command.usage) for command in _COMMANDS.values())
    return "\n".join(f"{command.usage:<{width}}  {command.help}" for command in _COMMANDS.values())


def _reset(conversation: Conversation, argument: str) -> str:
    conversation.reset()
    return "the conversation is forgotten; a new one begins"


def _stats(conversation: Conversation, argument: str) -> str:
    if conversation.last is None:
        return "no answer yet"
    used = f"{conversation.length:,} of {conversation.context_length:,} tokens"
    return "\n".join(
        [
            "last answer",
            *_figures(conversation.last),
            "all answers",
            *_figures(conversation.total),
            f"context        {used}",
            f"depth          {depth_now(conversation)}",
        ]
    )


def _figures(tally: Tally) -> list[str]:
    return [
        f"  tokens       {tally.tokens} ({tally.speed:.1f} a second)",
        f"  cycles       {tally.cycles} ({tally.per_cycle:.2f} tokens a cycle)",
        f"  acceptance   {tally.acceptance or 'nothing was drafted'}",
    ]


def _depth(conversation: Conversation, argument: str) -> str:
    limit = conversation.max_depth
    if argument:
        depth = parse_depth(argument)
        if isinstance(depth, int) and depth > limit:
            allowed = f"0..{limit}" if limit else "0 only: no MTP head is in use"
            raise InvalidRequest(f"depth {argument} is not possible here; allowed: {allowed}, or auto")
        conversation.set_depth(argument)
    return f"depth {depth_now(conversation)}"


def depth_now(conversation: Conversation) -> str:
    """The depth of the next answer, for people."""
    depth = conversation.params.depth
    if not conversation.max_depth:
        return "0: plain decoding, no MTP head is in use"
    return f"auto (up to {conversation.max_depth})" if depth == "auto" else str(depth)


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        conversation.system = None if argument == "none" else argument
    return "no system prompt" if conversation.system is None else f"system prompt: {conversation.system}"


def _think(conversation: Conversation, argument: str) -> str:
    if argument not in ("", "on", "off"):
        raise InvalidRequest(f"thinking is on or off, not {argument!r}")
    if argument == "on" and not conversation.knows_thinking:
        return "the model's chat template knows no thinking: it stays off"
    if argument:
        conversation.think = argument == "on"
    return f"thinking {'on' if conversation.think else 'off'}"


def _image(conversation: Conversation, argument: str) -> str:
    if argument == "none":
        conversation.images.clear()
    elif argument:
        for path in named_files(argument):
            conversation.attach(path)
    names = ", ".join(name for name, _ in conversation.images)
    return f"the next message shows {names}" if names else "no image"


def _quit(conversation: Conversation, argument: str) -> str:
    raise Leave


_COMMANDS = {
    command.usage.split(" ")[0]: command
    for command in (
        _Command("/help", "this list", _help),
        _Command("/reset", "forget the conversation and begin a new one", _reset),
        _Command("/stats", "figures of the last answer and of all answers", _stats),
        _Command("/depth N|auto", "tokens drafted a cycle, from now on; 0 is plain decoding", _depth),
        _Command("/system TEXT", "set the system prompt; 'none' removes it", _system),
        _Command("/think on|off", "let the model reason before it answers", _think),
        _Command("/image FILE", "show an image with the next message; 'none' takes it back", _image),
        _Command("/quit", "leave; so does Ctrl-D", _quit),
    )
}
