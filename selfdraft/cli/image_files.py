"""Images in files, for a prompt: what stands in a message for a model here or for a server. Knows no terminal."""

from __future__ import annotations

import base64
import mimetypes
import shlex
from pathlib import Path
from typing import Any

from ..errors import ImageTooLarge, InvalidRequest

__all__ = ["content", "image_part", "image_url_part", "named_files"]


def image_part(path: Path) -> dict[str, Any]:
    """The part of a message that shows an image to a model in this process.

    Raises:
        InvalidRequest: a file that cannot be read, or is no image; with its name.
    """
    from ..images import read_picture  # and NumPy, which most commands do without

    data = _read(path)
    try:
        return {"type": "image", "image": read_picture(data)}
    except InvalidRequest as error:
        raise type(error)(f"{path}: {error}", param="image") from error


def image_url_part(path: Path) -> dict[str, Any]:
    """The part of a message that shows an image to a server, which looks at what it is.

    Raises:
        InvalidRequest: a file that cannot be read.
    """
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    url = f"data:{kind};base64,{base64.b64encode(_read(path)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def content(images: list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """The content of a message: the images first, as models are trained."""
    return [*images, {"type": "text", "text": text}] if images else text


def named_files(line: str) -> list[Path]:
    """The files that a line names: one whose name it is, or several as a shell reads them.

    Raises:
        InvalidRequest: a quote that nothing closes.
    """
    whole = Path(line).expanduser()
    if whole.exists():
        return [whole]
    try:
        return [Path(word).expanduser() for word in shlex.split(line)]
    except ValueError as error:
        raise InvalidRequest(f"{line!r} names no file ({error})", param="image") from error


def _read(path: Path) -> bytes:
    from ..images import ImageLimits

    most = ImageLimits().bytes
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}", param="image") from error
    if len(data) > most:
        raise ImageTooLarge(f"{path} has over {most:,} bytes: make the image smaller", param="image")
    return data
