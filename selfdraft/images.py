"""Images: from the bytes of a file to pixels, within limits. Knows file formats; nothing of requests or of models."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ImageTooLarge, InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

__all__ = ["FORMATS", "ImageLimits", "Picture", "in_messages", "read_picture"]

FORMATS = "PNG, JPEG, WebP, GIF or BMP"

MEGAPIXEL = 1_000_000
_MIB = 2**20
_ORIENTATION = 0x0112  # of EXIF: how the camera was held
_SHOWN = 12  # bytes of a file that a message quotes


@dataclass(frozen=True)
class ImageLimits:
    """How large an image may be.

    Attributes:
        bytes: most bytes of its file.
        pixels: most pixels.
    """

    bytes: int = 20 * _MIB
    pixels: int = 50 * MEGAPIXEL


@dataclass(frozen=True)
class Picture:
    """An image as a model sees it: upright and opaque. Two are equal if all their pixels are.

    Attributes:
        rgb: uint8 [height, width, 3], read-only.
        digest: SHA-256 of height, width and pixels, in hex.
    """

    rgb: np.ndarray = field(repr=False, compare=False)
    digest: str

    @classmethod
    def of(cls, rgb: np.ndarray) -> Picture:
        """The picture of such pixels, which are copied.

        Raises:
            InvalidRequest: another shape or dtype, or no pixel.
        """
        if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3 or rgb.size == 0:
            raise InvalidRequest(
                f"pixels must be uint8 [height, width, 3], not {rgb.dtype} {list(rgb.shape)}", param="image"
            )
        kept = rgb.copy(order="C")
        kept.flags.writeable = False
        height, width, _ = kept.shape
        digest = hashlib.sha256(f"{height}x{width}:".encode())
        digest.update(kept.data)
        return cls(kept, digest.hexdigest())

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        height, width, _ = self.rgb.shape
        return width, height


def read_picture(data: bytes, limits: ImageLimits = ImageLimits()) -> Picture:
    """The picture in an image file: turned as its EXIF data says, what is transparent on white.

    The size is read before any pixel is. Of a GIF it is the first frame.

    Args:
        data: the whole file: PNG, JPEG, WebP, GIF or BMP, told apart by what is in it.

    Raises:
        InvalidRequest: another format, a file that is damaged or cut off, an animated PNG or WebP; Pillow is missing.
        ImageTooLarge: a file or an image over its limit.
    """
    if not data:
        raise InvalidRequest(f"the image is empty; send a {FORMATS} file", param="image")
    if len(data) > limits.bytes:
        raise ImageTooLarge(
            f"the image file has {len(data):,} bytes; at most {limits.bytes:,} are accepted: make it smaller",
            param="image",
        )
    opened = _opener(data)
    from PIL.Image import DecompressionBombError

    try:
        image = opened(io.BytesIO(data))
        _check(image, limits)
        image.load()
        return Picture.of(np.asarray(_opaque(_upright(image))))
    except InvalidRequest:
        raise
    except DecompressionBombError as error:  # of WebP, whose decoder takes the memory as it opens the file
        raise ImageTooLarge(
            f"{error} Here at most {limits.pixels:,} are accepted: make it smaller", param="image"
        ) from error
    except Exception as error:  # decoders raise whatever they stumble over in a hostile file
        raise InvalidRequest(
            f"the image is damaged or cut off ({type(error).__name__}: {str(error)[:120]}); send the whole file",
            param="image",
        ) from error


def in_messages(messages: Iterable[Any]) -> list[Picture]:
    """The pictures of a conversation, in order.

    Raises:
        InvalidRequest: an image part without a `Picture`, or a video.
    """
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
    found = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and "video" in kind:
            raise InvalidRequest("videos cannot be read; send single frames of it as images", param="messages")
        if kind == "image":
            if not isinstance(part.get("image"), Picture):
                raise InvalidRequest(
                    f"an image part holds a Picture, as selfdraft.images.read_picture makes it, not "
                    f"{type(part.get('image')).__name__}",
                    param="messages",
                )
            found.append(part["image"])
    return found


def _opener(data: bytes) -> Callable[[io.BytesIO], ImageFile]:
    """What opens such a file. Pillow's own way of finding it would load every format it knows."""
    try:
        from PIL import BmpImagePlugin, GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin
    except ImportError as error:
        raise InvalidRequest("reading images needs Pillow: pip install 'selfdraft[vision]'", param="image") from error
    webp: Callable[[io.BytesIO], ImageFile] = WebPImagePlugin.WebPImageFile
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return webp
    openers: dict[bytes, Callable[[io.BytesIO], ImageFile]] = {
        b"\x89PNG\r\n\x1a\n": PngImagePlugin.PngImageFile,
        b"\xff\xd8\xff": JpegImagePlugin.JpegImageFile,
        b"GIF87a": GifImagePlugin.GifImageFile,
        b"GIF89a": GifImagePlugin.GifImageFile,
        b"BM": BmpImagePlugin.BmpImageFile,
    }
    for begin, opener in openers.items():
        if data.startswith(begin):
            return opener
    raise InvalidRequest(
        f"the image is of no format that is read here (it begins with {data[:_SHOWN]!r}); send {FORMATS}", param="image"
    )


def _check(image: ImageFile, limits: ImageLimits) -> None:
    """Refuse by what the header says."""
    width, height = image.size
    if width < 1 or height < 1:
        raise InvalidRequest(f"the image is {width}x{height} pixels; send one that has some", param="image")
    if width * height > limits.pixels:
        raise ImageTooLarge(
            f"the image has {width}x{height} pixels; at most {limits.pixels:,} are accepted: make it smaller",
            param="image",
        )
    frames = getattr(image, "n_frames", 1) if image.format in ("PNG", "WEBP") else 1
    if frames > 1:
        raise InvalidRequest(
            f"the image is animated ({frames} frames), and one picture is read: send the frame that matters",
            param="image",
        )


def _upright(image: Image) -> Image:
    """Turned to how the camera was held."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # notes that nobody can read say nothing; the pixels are there all the same
        turn = None
    return image if turn is None else image.transpose(turn)


def _opaque(image: Image) -> Image:
    """In RGB, on white."""
    from PIL.Image import fromarray, new

    if image.mode.startswith("I"):  # 16 bits of grey, which `convert` would cut off at 255
        return fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = new("RGB", layer.size, "white")
    white.paste(layer, mask=layer.getchannel("A"))
    return white
