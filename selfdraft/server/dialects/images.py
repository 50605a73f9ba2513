"""Images as parts of a content, in the forms of all three APIs. Knows those forms; reads no image.

A part that is an image becomes an `ImageSource`, which says where its bytes are and where in the request it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import InvalidRequest
from ..jobs import ImageSource

__all__ = ["image_source"]


def image_source(part: object, where: str) -> ImageSource | None:
    """Where the image of a part is to be had; None if it is no image.

    `image_url` (chat) and `input_image` (responses) name it by a URL, bare or in an object; `image` (messages) holds
    its base64 or names a URL. `detail` and `transformations` say how services of their makers scale images; a model
    here scales them as it was trained with.

    Args:
        part: as it came.
        where: the field's path, for messages.

    Raises:
        InvalidRequest: an image without either, or one that is stored elsewhere.
    """
    match part:
        case {"type": "image_url" | "input_image", "image_url": str(url) | {"url": str(url)}}:
            return ImageSource(url, where)
        case {"type": "image", "source": {"type": "base64", "data": str(data), **rest}}:
            return ImageSource(f"data:{rest.get('media_type', '')};base64,{data}", where)
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return ImageSource(url, where)
        case {"type": "image_url" | "input_image" | "image" as kind, **rest}:
            raise _unreadable(kind, rest, where)
        case _:
            return None


def _unreadable(kind: str, rest: Mapping[Any, Any], where: str) -> InvalidRequest:
    source = rest.get("source")
    stored = rest.get("file_id") or (source.get("file_id") if isinstance(source, dict) else None)
    if stored:
        return InvalidRequest(
            f"{where} names the stored file {str(stored)[:120]!r}, and this server stores none: send the image itself",
            param=where.split("[")[0],
        )
    wanted = {
        "image_url": 'an image_url such as {"url": "data:image/png;base64,..."}',
        "input_image": "an image_url such as data:image/png;base64,...",
        "image": 'a source such as {"type": "base64", "media_type": "image/png", "data": "..."}',
    }
    return InvalidRequest(f"{where} is of type {kind!r} and must have {wanted[kind]}", param=where.split("[")[0])
