"""The images of a job: counted, had and read, beside the event loop. Knows no wire format and no model."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from ..errors import ImageTooLarge, InvalidRequest
from ..images import MEGAPIXEL, Picture, read_picture
from .config import ServerSettings
from .dialects.limits import at_most
from .errors import QueueFull
from .jobs import ChatJob, ImageSource
from .remote_images import Fetcher

__all__ = ["Pictures"]

_AT_ONCE = 2  # images that are read, of all requests: one in the making takes several times its pixels
_TOGETHER = 4  # times the most pixels of one request, that all may hold at once
_RETRY = 5.0  # seconds
_SHOWN = 60  # characters of a URL that a message quotes


class Pictures:
    """Reads the images of jobs.

    Args:
        settings: how many, how large, and whether from elsewhere.
        fetcher: fetches those that lie elsewhere, if the settings allow it.
    """

    def __init__(self, settings: ServerSettings, fetcher: Fetcher | None = None) -> None:
        self._settings = settings
        self._limits = settings.image_limits()
        self._fetcher = (fetcher or Fetcher(self._limits.bytes)) if settings.remote_images else None
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._held: WeakValueDictionary[int, Picture] = WeakValueDictionary()  # as long as any request has them

    async def read(self, job: ChatJob, *, blind: str) -> ChatJob:
        """The job with a `Picture` in the place of every `ImageSource`.

        Args:
            blind: why the model reads no images; empty if it does.

        Raises:
            InvalidRequest: an image and a model that reads none; one that cannot be had or read.
            RequestTooLarge, ImageTooLarge: too many, or too large.
            QueueFull: other requests hold as many pixels as the server may.
        """
        sources = [part["image"] for message in job.messages for part in _parts(message) if _is_image(part)]
        if not sources:
            return job
        if blind:
            raise InvalidRequest(
                f"{sources[0].where} is an image, and this model reads text only ({blind}): leave it out, or ask a "
                "model with vision",
                param=_param(sources[0]),
            )
        at_most(sources, self._settings.max_images, _param(sources[0]), "images")
        pixels = 0
        messages = []
        for message in job.messages:
            parts = _parts(message)
            for n, part in enumerate(parts):
                if _is_image(part):
                    self._check_room()
                    picture = await self._picture(part["image"])
                    self._held[id(picture)] = picture
                    pixels += _pixels(picture)
                    self._check_together(part["image"], pixels)
                    parts[n] = {**part, "image": picture}
            messages.append({**message, "content": parts} if parts else message)
        return replace(job, messages=messages)

    def _check_room(self) -> None:
        """Whether another image may be read: requests that wait hold their images, and a small file has many pixels."""
        most = _TOGETHER * self._settings.max_request_pixels
        if sum(map(_pixels, list(self._held.values()))) >= most * MEGAPIXEL:
            raise QueueFull(
                f"the images of requests that run or wait have {most} megapixels, the most that are held; try again "
                "later",
                retry_after=_RETRY,
            )

    def _check_together(self, source: ImageSource, pixels: int) -> None:
        most = self._settings.max_request_pixels
        if pixels > most * MEGAPIXEL:
            raise ImageTooLarge(
                f"{source.where}: the images so far have over {most} megapixels together: send fewer or smaller ones",
                param=_param(source),
            )

    async def _picture(self, source: ImageSource) -> Picture:
        try:
            file = source.url if source.url[:5].lower() == "data:" else await self._fetched(source.url)
            async with self._places:
                return await asyncio.to_thread(self._read, file)
        except InvalidRequest as error:
            raise type(error)(f"{source.where}: {error}", param=_param(source)) from error

    async def _fetched(self, url: str) -> bytes:
        if not url.lower().startswith(("http://", "https://")):
            raise InvalidRequest(
                f"{url[:_SHOWN]!r} is neither a data: URL nor an http(s) address: send data:image/png;base64,..."
            )
        if self._fetcher is None:
            raise InvalidRequest(
                f"the image lies elsewhere ({url[:_SHOWN]!r}), and this server fetches none: send "
                "data:image/png;base64,..., or start the server with --remote-images"
            )
        return await self._fetcher.fetch(url)

    def _read(self, file: str | bytes) -> Picture:
        return read_picture(_embedded(file) if isinstance(file, str) else file, self._limits)


def _embedded(url: str) -> bytes:
    """The file in a data: URL. What kind of image it is says the file itself."""
    about, comma, data = url.partition(",")
    if not comma or not about.lower().endswith(";base64"):
        raise InvalidRequest(f"{url[:_SHOWN]!r} is no data: URL in base64: send data:image/png;base64,...")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"its base64 is damaged ({error}): send the whole image") from error


def _pixels(picture: Picture) -> int:
    return picture.rgb.size // 3


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return list(content) if isinstance(content, list) else []


def _is_image(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("image"), ImageSource)


def _param(source: ImageSource) -> str:
    return source.where.split("[")[0]
