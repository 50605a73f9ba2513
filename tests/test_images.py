"""Guards what becomes of an image file: the pixels a person sees, or one refusal that says what is wrong. No file,
however damaged, does anything else, and none is decoded whose header says that it is too large."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageOps

from selfdraft.errors import ImageTooLarge, InvalidRequest
from selfdraft.images import ImageLimits, Picture, read_picture

PIXELS = np.random.default_rng(7).integers(0, 256, (9, 6, 3), dtype=np.uint8)
LOSSLESS = {"PNG": {}, "BMP": {}, "GIF": {}, "WEBP": {"lossless": True}}


def file(image: Image.Image, format: str, **options: Any) -> bytes:
    """An image as a file."""
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def png(width: int, height: int) -> bytes:
    """A PNG file that says it has such a size, and has hardly a pixel."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    about = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", about) + chunk(b"IDAT", zlib.compress(b"\0"))


IMAGE = Image.fromarray(PIXELS)
FILES = {
    **{format: file(IMAGE, format, **options) for format, options in LOSSLESS.items()},
    "JPEG": file(IMAGE, "JPEG"),
    "alpha": file(IMAGE.convert("RGBA"), "PNG"),
    "palette": file(IMAGE.quantize(8), "PNG", transparency=0),
    "RLE": file(Image.new("P", (9, 9)), "BMP"),
    "progressive": file(IMAGE, "JPEG", progressive=True, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"),
    "lossy": file(IMAGE, "WEBP"),
}


# What is read


@pytest.mark.parametrize("format", LOSSLESS)
def test_pixels_are_those_of_the_file(format: str) -> None:
    picture = read_picture(FILES[format])
    assert picture.size == (6, 9)
    assert picture.rgb.dtype == np.uint8
    assert np.array_equal(picture.rgb, PIXELS)
    assert picture == Picture.of(PIXELS)


def test_a_photograph() -> None:
    """JPEG keeps no pixels; Pillow says which it has."""
    expected = np.asarray(Image.open(io.BytesIO(FILES["JPEG"])).convert("RGB"))
    assert np.array_equal(read_picture(FILES["JPEG"]).rgb, expected)


def test_a_photograph_with_a_second_picture_inside() -> None:
    """Phones put another one, of the depth or the highlights, behind the first."""
    both = file(IMAGE, "MPO", save_all=True, append_images=[ImageOps.invert(IMAGE)])
    assert np.array_equal(read_picture(both).rgb, read_picture(FILES["JPEG"]).rgb)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_it_is_turned_upright(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = file(IMAGE, format, exif=exif, **LOSSLESS[format])
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(turned))))
    assert np.array_equal(read_picture(turned).rgb, expected)
    assert (expected.shape == PIXELS.shape) == (orientation < 5)


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_notes_that_cannot_be_read_do_not_matter(exif: bytes) -> None:
    assert np.array_equal(read_picture(file(IMAGE, "PNG", exif=exif)).rgb, PIXELS)


def test_what_is_transparent_is_on_white() -> None:
    alpha = np.full((9, 6, 1), 255, np.uint8)
    alpha[:3] = 0
    alpha[3:6] = 128
    seen = read_picture(file(Image.fromarray(np.concatenate([PIXELS, alpha], axis=2)), "PNG")).rgb
    assert np.array_equal(seen[6:], PIXELS[6:])
    assert (seen[:3] == 255).all()
    half = PIXELS[3:6] * (128 / 255) + 255 * (127 / 255)
    assert np.abs(seen[3:6] - half).max() <= 1


@pytest.mark.parametrize("mode", ["LA", "P"])
def test_other_ways_to_be_transparent(mode: str) -> None:
    image, options = Image.new("L", (4, 4), 0), {}
    if mode == "LA":
        image.putalpha(0)
    else:
        options["transparency"] = 0
        image = image.convert("P")
    assert (read_picture(file(image, "PNG", **options)).rgb == 255).all()


def test_grey_of_16_bits_keeps_its_shades() -> None:
    grey = (np.arange(54, dtype=np.uint16) * 1200).reshape(9, 6)
    seen = read_picture(file(Image.fromarray(grey), "PNG")).rgb
    assert np.array_equal(seen, np.repeat((grey >> 8)[..., None], 3, axis=2))


def test_of_an_animated_gif_it_is_the_first_frame() -> None:
    frames = [IMAGE.quantize(8), ImageOps.invert(IMAGE).quantize(8)]
    moving = file(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(read_picture(moving).rgb, np.asarray(frames[0].convert("RGB")))


# Pictures


def test_a_digest_tells_pictures_apart() -> None:
    one = Picture.of(PIXELS)
    changed = PIXELS.copy()
    changed[4, 2, 1] ^= 1
    others = [Picture.of(changed), Picture.of(PIXELS.reshape(6, 9, 3)), Picture.of(PIXELS.reshape(54, 1, 3))]
    assert len({one.digest, *(other.digest for other in others)}) == 4
    assert one == Picture.of(np.asfortranarray(PIXELS))
    assert len(one.digest) == 64


def test_a_picture_stays_as_it_is() -> None:
    mine = PIXELS.copy()
    picture = Picture.of(mine)
    mine[:] = 0
    assert np.array_equal(picture.rgb, PIXELS)
    with pytest.raises(ValueError, match="read-only"):
        picture.rgb[0, 0, 0] = 1


def test_pixels_do_not_go_into_logs() -> None:
    assert repr(Picture.of(PIXELS)) == f"Picture(digest='{Picture.of(PIXELS).digest}')"


@pytest.mark.parametrize("pixels", [PIXELS[..., :2], PIXELS.astype(np.float32), PIXELS[:0], PIXELS[0]])
def test_other_arrays_are_no_pictures(pixels: np.ndarray) -> None:
    with pytest.raises(InvalidRequest, match="uint8"):
        Picture.of(pixels)


# What is refused


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty; send"),
        (b"<svg xmlns='http", r"begins with b\"<svg xmlns='\"\); send PNG, JPEG"),
        (b"%PDF-1.7 and so on", "no format that is read here"),
        (b"RIFF\x10\0\0\0AVI LIST", "no format that is read here"),
        (file(IMAGE, "TIFF"), "no format that is read here"),
        (file(IMAGE, "ICO"), "no format that is read here"),
        (png(6, 9), "damaged or cut off"),
        (png(0, 9), "damaged or cut off|0x9 pixels"),
        (b"GIF89a\0\0\0\0\0\0\0;", "damaged or cut off|0x0 pixels"),
        *((whole[: len(whole) * 2 // 3], "damaged or cut off") for whole in FILES.values()),
    ],
)
def test_what_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        read_picture(data)
    assert refused.value.param == "image"
    assert not isinstance(refused.value, ImageTooLarge)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_other_animations_are_refused(format: str) -> None:
    moving = file(IMAGE, format, save_all=True, append_images=[ImageOps.invert(IMAGE)])
    with pytest.raises(InvalidRequest, match=r"animated \(2 frames\), and one picture is read: send the frame"):
        read_picture(moving)


@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_limits(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pixel, or one byte, more than allowed; and no pixel is decoded to find out."""
    data = FILES[format]
    assert read_picture(data, ImageLimits(bytes=len(data), pixels=54)).size == (6, 9)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageTooLarge, match=f"{len(data)} bytes; at most {len(data) - 1} are accepted"):
        read_picture(data, ImageLimits(bytes=len(data) - 1))
    with pytest.raises(ImageTooLarge, match="6x9 pixels; at most 53 are accepted: make it smaller"):
        read_picture(data, ImageLimits(pixels=53))


@pytest.mark.parametrize("side", [20_000, 100_000, 2**31 - 1])
def test_a_bomb_is_refused_by_its_header(side: int) -> None:
    """It says that it has billions of pixels, in seventy bytes."""
    with pytest.raises(ImageTooLarge, match=f"{side}x{side} pixels"):
        read_picture(png(side, side))


def test_a_bomb_in_webp() -> None:
    """Its decoder takes memory for all pixels as it opens the file: refused before that."""
    size = 16383 - 1
    chunk = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + size.to_bytes(3, "little") * 2
    data = b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk
    with pytest.raises(ImageTooLarge):
        read_picture(data)


# Whatever the bytes


@given(st.data())
@settings(max_examples=300, deadline=None)
@pytest.mark.filterwarnings("ignore:::PIL")
def test_no_bytes_do_harm(data: st.DataObject) -> None:
    """Files with bytes changed, cut out and put in are a picture within the limits, or refused."""
    limits = ImageLimits(bytes=10_000, pixels=10_000)
    mangled = bytearray(data.draw(st.sampled_from(list(FILES.values()))))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(mangled)))
        end = place + data.draw(st.integers(0, 4))
        mangled[place:end] = data.draw(st.binary(max_size=4))
    try:
        picture = read_picture(bytes(mangled), limits)
    except InvalidRequest:
        return
    width, height = picture.size
    assert 1 <= width * height <= limits.pixels
    assert picture.rgb.shape == (height, width, 3)
