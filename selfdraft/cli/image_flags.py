"""Flags about images: those that a server takes, and those that a prompt is about."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .flags import flag, whole

__all__ = ["ImageFlags", "ShownFlags"]

_IMAGES = "Images"


@dataclass(frozen=True, kw_only=True)
class ImageFlags:
    """A flag for every field of `ServerSettings` that is about images, under the same name."""

    max_images: Annotated[
        int | None,
        flag("--max-images", "Most images of a request, all its messages counted. Default: 64.", _IMAGES, "N", whole),
    ] = None
    max_image_file: Annotated[
        int | None, flag("--max-image-file", "Most MiB of an image's file. Default: 20.", _IMAGES, "MIB", whole)
    ] = None
    max_image_pixels: Annotated[
        int | None, flag("--max-image-pixels", "Most megapixels of an image. Default: 50.", _IMAGES, "N", whole)
    ] = None
    max_request_pixels: Annotated[
        int | None,
        flag(
            "--max-request-pixels",
            "Most megapixels of all images of a request together. Default: 200.",
            _IMAGES,
            "N",
            whole,
        ),
    ] = None
    remote_images: Annotated[
        bool | None,
        flag(
            "--remote-images",
            "Fetch images that a request names by an http or https address; never from an address that is not public. "
            "Without it a request must hold its images.",
            _IMAGES,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ShownFlags:
    """What a prompt is about."""

    image: Annotated[
        list[Path] | None,
        flag(
            "--image",
            "Image that the prompt is about: PNG, JPEG, WebP, GIF or BMP, for models that read images; repeatable. "
            "Default: none.",
            metavar="FILE",
        ),
    ] = None
