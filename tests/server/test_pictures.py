"""Guards what a request may show: only a model that sees is shown anything, within the caps, in the order of the
request, and never at the cost of other requests. No model runs here."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import time
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selfdraft.errors import ImageTooLarge, InvalidRequest
from selfdraft.images import Picture, read_picture
from selfdraft.server import pictures as module
from selfdraft.server.config import load_server_settings
from selfdraft.server.dialects.failures import describe
from selfdraft.server.dialects.limits import RequestTooLarge
from selfdraft.server.errors import QueueFull
from selfdraft.server.jobs import ChatJob, ImageSource
from selfdraft.server.pictures import Pictures

FAR = "https://pictures.example/a.png"


def png(width: int = 4, height: int = 3, shade: int = 0) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 0, 0)).save(out, "PNG")
    return out.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def job(*urls: str) -> ChatJob:
    """A conversation of two turns, with the last image in the second."""
    parts = [{"type": "image", "image": ImageSource(each, f"messages[1].content[{n}]")} for n, each in enumerate(urls)]
    question = {"type": "text", "text": "which?"}
    return ChatJob(
        messages=[
            {"role": "system", "content": "s"},
            {"role": "user", "content": [*parts[:-1], question, *parts[-1:]]},
            {"role": "assistant", "content": "that"},
        ]
    )


class Files:
    """Fetches from a dict."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    async def fetch(self, url: str) -> bytes:
        return self.files[url]


def reading(asked: ChatJob, *, blind: str = "", fetcher: Any = None, **given: Any) -> ChatJob:
    async def run() -> ChatJob:
        return await Pictures(load_server_settings(**given), fetcher).read(asked, blind=blind)

    return asyncio.run(run())


def shown(asked: ChatJob) -> list[Any]:
    content = asked.messages[1]["content"]
    return [part["image"] if part["type"] == "image" else part["text"] for part in content]


# What is read


def test_sources_become_pictures_in_their_places() -> None:
    files = [png(shade=n) for n in range(3)]
    asked = job(*map(url, files))
    read = reading(asked)
    first, second, text, third = shown(read)
    assert [first, second, third] == [read_picture(file) for file in files]
    assert text == "which?"
    assert (read.messages[0], read.messages[2]) == (asked.messages[0], asked.messages[2])
    assert all(isinstance(image, ImageSource) for image in shown(asked) if image != "which?")  # the job as it was


def test_a_job_without_images_passes() -> None:
    asked = ChatJob(messages=[{"role": "user", "content": "hi"}])
    assert reading(asked, blind="it has no eyes") is asked


@pytest.mark.parametrize(
    "given",
    [
        url(png()),
        url(png()).replace("data:", "DATA:"),
        url(png(), "application/octet-stream"),  # what it is says the file
        url(png(), "text/plain;charset=utf-8"),
        url(png(), ""),
        url(png())[:60] + "\n" + url(png())[60:],  # as MIME wraps it
    ],
)
def test_forms_of_a_data_url(given: str) -> None:
    assert shown(reading(job(given)))[-1] == read_picture(png())


def test_an_image_from_elsewhere() -> None:
    read = reading(job(FAR), remote_images=True, fetcher=Files({FAR: png()}))
    assert shown(read)[-1] == read_picture(png())


# What is refused


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("data:image/png,abc", "no data: URL in base64"),
        ("data:image/png;base64", "no data: URL in base64"),
        ("data:image/png;base64,abc", "its base64 is damaged"),
        ("data:image/png;base64,ab-_", "its base64 is damaged"),
        ("data:image/png;base64,äö", "its base64 is damaged"),
        (url(png()) + "!", "its base64 is damaged"),
        ("data:image/png;base64,", "the image is empty"),
        (url(b"<svg/>", "image/svg+xml"), "no format that is read here"),
        (url(png()[:44]), "damaged or cut off"),
        ("", "'' is neither a data: URL nor an http(s) address"),
        ("/etc/passwd", "'/etc/passwd' is neither"),
        ("file:///etc/passwd", "is neither"),
        ("ftp://example.com/a.png", "is neither"),
        (base64.b64encode(png()).decode(), "is neither"),
        (FAR, "this server fetches none: send data:image/png;base64,..., or start the server with --remote-images"),
        ("HTTP://example.com/a.png", "this server fetches none"),
    ],
)
def test_what_is_no_image(given: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        reading(job(url(png()), given), fetcher=Files({FAR: png()}))
    assert str(refused.value).startswith("messages[1].content[1]: ")
    assert says in str(refused.value)
    assert len(str(refused.value)) < 300
    assert refused.value.param == "messages"
    assert describe(refused.value).status == 400


def test_a_model_that_reads_text_only() -> None:
    """It is said before anything is decoded, or fetched."""
    with pytest.raises(InvalidRequest) as refused:
        reading(job("data:image/png;base64,rubbish"), blind="the checkpoint has no vision tower")
    says = "messages[1].content[0] is an image, and this model reads text only (the checkpoint has no vision tower): "
    assert str(refused.value).startswith(says)
    assert describe(refused.value).status == 400


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"max_images": 2}, RequestTooLarge, "messages holds 3 images; at most 2 are accepted"),
        ({"max_images": 0}, RequestTooLarge, "messages holds 3 images; at most 0"),
        ({"max_image_pixels": 1}, ImageTooLarge, "messages[1].content[1]: the image has 1001x1000 pixels; at most 1,"),
        ({"max_request_pixels": 2}, ImageTooLarge, "content[2]: the images so far have over 2 megapixels together"),
    ],
)
def test_too_much(given: dict[str, int], kind: type[InvalidRequest], says: str) -> None:
    files = [png(1000, 1000), png(1001, 1000), png(10, 10)]
    if "max_request_pixels" in given:
        files = [png(1000, 1000), png(1000, 1000), png(1, 1)]
    with pytest.raises(kind) as refused:
        reading(job(*map(url, files)), **given)
    assert says in str(refused.value)
    assert describe(refused.value).status == 413
    assert describe(refused.value).param == "messages"


def test_a_file_that_is_too_large() -> None:
    large = png() + bytes(2**20)
    with pytest.raises(ImageTooLarge, match="at most 1,048,576 are accepted"):
        reading(job(url(large)), max_image_file=1)
    with pytest.raises(ImageTooLarge, match="at most 1,048,576 are accepted"):
        reading(job(FAR), max_image_file=1, remote_images=True, fetcher=Files({FAR: large}))


# Beside other requests


def test_the_event_loop_goes_on_while_images_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than two are read at once, however many requests there are."""
    running, most, lock = 0, 0, threading.Lock()

    def slow(data: bytes, limits: object) -> Picture:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.1)
        with lock:
            running -= 1
        return Picture.of(np.zeros((1, 1, 3), np.uint8))

    monkeypatch.setattr(module, "read_picture", slow)

    async def run() -> float:
        pictures = Pictures(load_server_settings())
        tasks: list[Awaitable[ChatJob]] = [
            asyncio.ensure_future(pictures.read(job(url(png())), blind="")) for _ in range(6)
        ]
        longest = 0.0
        while not all(task.done() for task in tasks):  # type: ignore[attr-defined]
            begin = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - begin)
        await asyncio.gather(*tasks)
        return longest

    assert asyncio.run(run()) < 0.09
    assert most == 2


def test_requests_that_wait_hold_images_within_a_bound() -> None:
    async def scenario() -> None:
        pictures = Pictures(load_server_settings(max_request_pixels=1))
        large = job(url(png(1000, 999)))
        held = [await pictures.read(large, blind="") for _ in range(5)]  # the fifth begins just below the bound
        with pytest.raises(QueueFull, match="4 megapixels") as refused:
            await pictures.read(large, blind="")
        assert describe(refused.value).status == 429
        held.pop()
        held.pop()
        held.append(await pictures.read(large, blind=""))

    asyncio.run(scenario())
