"""Messages in the form that jobs hold them, put together from what dialects send. Knows no dialect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from ...errors import InvalidRequest
from ..jobs import ImageSource
from . import limits
from .images import image_source
from .limits import at_most

__all__ = [
    "Content",
    "Conversation",
    "Piece",
    "content_of",
    "is_open",
    "joined",
    "only_text",
    "piece_of",
    "results_in_order",
    "text_of",
]

Piece = str | ImageSource

Content = str | list[dict[str, Any]]
"""Of a message: a string or, where there are images, parts in their order (see `ChatJob`)."""

_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "refusal"})


class Conversation:
    """Messages in the making: what belongs to one turn of the assistant comes together in one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def system(self, text: str) -> None:
        """Instructions, at their place; empty ones are none."""
        if text.strip():
            self.messages.append({"role": "system", "content": text})

    def user(self, content: Content) -> None:
        """A message of the user."""
        self.messages.append({"role": "user", "content": content})

    def tool(self, call_id: str, content: Content) -> None:
        """The result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def assistant(self, *, text: str = "", reasoning: str = "", call: Mapping[str, Any] | None = None) -> None:
        """Some of an assistant's turn; text and reasoning that come in pieces are joined as they are."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        turn = self.messages[-1]
        turn["content"] += text
        if reasoning:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + reasoning
        if call is not None:
            turn.setdefault("tool_calls", []).append(call)

    def finish(self) -> list[dict[str, Any]]:
        """All messages.

        Raises:
            InvalidRequest: there is none.
        """
        if not self.messages:
            raise InvalidRequest("there is no message; send at least one", param="messages")
        return results_in_order(self.messages)

    @property
    def open_ended(self) -> bool:
        """Whether it ends with text of the assistant, for the answer to go on."""
        return bool(self.messages) and is_open(self.messages[-1])


def is_open(message: Mapping[str, Any]) -> bool:
    """Whether an answer can go on where this message ends."""
    return message["role"] == "assistant" and not message.get("tool_calls")


def results_in_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with results that stand together in the order of their calls, those without a call last.

    Templates write no ids: the model knows the results of several calls by their order alone, and clients send them as
    they come. A result whose call is not there, because the client forgot it, stays a result.
    """
    ordered: list[dict[str, Any]] = []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        run = list(group)
        if role == "tool" and ordered:
            ids = [call["id"] for call in ordered[-1].get("tool_calls", ())]
            run.sort(key=lambda message: _place(message["tool_call_id"], ids))
        ordered += run
    return ordered


def _place(call_id: str, ids: Sequence[str]) -> int:
    return ids.index(call_id) if call_id in ids else len(ids)


def content_of(content: str | Sequence[Any] | None, where: str, *, separator: str = "") -> Content:
    """The text and the images of a content that is a string or a list of parts.

    Args:
        content: what came.
        where: the field's path, for messages.
        separator: what stands between two parts of text.

    Raises:
        InvalidRequest: a part that is neither. RequestTooLarge: too many parts.
    """
    return joined(_pieces(content, where), separator)


def text_of(content: str | Sequence[Any] | None, where: str, *, separator: str = "") -> str:
    """The same where no image may stand.

    Raises:
        InvalidRequest: a part that is no text. RequestTooLarge: too many parts.
    """
    return only_text(_pieces(content, where), separator)


def joined(pieces: Iterable[Piece], separator: str) -> Content:
    """Pieces as one content, in their order; texts beside each other are one, with `separator` between them."""
    parts: list[dict[str, Any]] = []
    for is_image, run in groupby(pieces, key=lambda piece: isinstance(piece, ImageSource)):
        if is_image:
            parts += [{"type": "image", "image": image} for image in run]
        else:
            parts.append({"type": "text", "text": separator.join(map(str, run))})
    if any(part["type"] == "image" for part in parts):
        return parts
    return str(parts[0]["text"]) if parts else ""


def only_text(pieces: Iterable[Piece], separator: str) -> str:
    """Pieces as one text, with `separator` between them.

    Raises:
        InvalidRequest: one is an image.
    """
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, ImageSource):
            raise InvalidRequest(
                f"{piece.where} is an image, and images stand in messages of the user and in results of tools: move it "
                "there",
                param=piece.where.split("[")[0],
            )
        texts.append(piece)
    return separator.join(texts)


def _pieces(content: str | Sequence[Any] | None, where: str) -> list[Piece]:
    if content is None or isinstance(content, str):
        return [content or ""]
    at_most(content, limits.MAX_PARTS, where, "parts")
    return [piece_of(part, f"{where}[{n}]") for n, part in enumerate(content)]


def piece_of(part: object, where: str) -> Piece:
    """The text or the image of one part of a content.

    Raises:
        InvalidRequest: it is neither.
    """
    param = where.split("[")[0]
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type, not {str(part)[:120]!r}", param=param)
    if (image := image_source(part, where)) is not None:
        return image
    if kind not in _TEXT_TYPES:
        raise InvalidRequest(
            f"{where} is of type {kind!r}, and what is read here is text and images: leave it out", param=param
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string, not {str(text)[:120]!r}", param=param)
    return text
