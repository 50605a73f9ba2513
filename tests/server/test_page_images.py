"""Images on the chat page, in a real Chromium against a scripted server: chosen, pasted, dropped, taken back, sent as
they are, and kept with the chat in this browser alone. Nothing is offered where the model reads text only."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from .chromium import browser_api, launched, watched
from .page_backend import Backend, served

expect = browser_api().expect


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def backend() -> Backend:
    backend = Backend()
    backend.vision = True
    return backend


@pytest.fixture
def page(browser: Any, backend: Backend) -> Iterator[Any]:
    with served(backend.app()) as address, watched(browser, address) as page:
        expect(page.locator("#model-name")).to_have_text("nano-mtp")
        yield page
        backend.held = False


def png(shade: int, width: int = 40, height: int = 20) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 80, 0)).save(out, "PNG")
    return out.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two images."""
    paths = [tmp_path / "one.png", tmp_path / "two.png"]
    for shade, path in enumerate(paths):
        path.write_bytes(png(shade))
    return paths


def attached(page: Any) -> list[str]:
    names: list[str] = page.locator("#attached img").evaluate_all("images => images.map((image) => image.alt)")
    return names


def answered(page: Any, text: str) -> None:
    last = page.locator(".answer").last
    expect(last).to_have_attribute("data-status", "done")
    expect(last.locator(".markdown")).to_have_text(text)


def give(page: Any, how: str, *given: tuple[str, str, bytes], text: str = "") -> None:
    """Paste or drop files, each a name, a type and what is in it."""
    page.evaluate(
        """([how, given, text]) => {
          const transfer = new DataTransfer();
          for (const [name, type, data] of given) {
            transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, {type}));
          }
          if (text) transfer.setData("text/plain", text);
          const options = {bubbles: true, cancelable: true};
          const paste = () => new ClipboardEvent("paste", {...options, clipboardData: transfer});
          const drag = (type) => new DragEvent(type, {...options, dataTransfer: transfer});
          const target = document.querySelector(how === "paste" ? "#input" : "#conversation");
          const events = how === "paste" ? [paste()] : [drag("dragover"), drag("drop")];
          window.taken = events.map((event) => !target.dispatchEvent(event));
        }""",
        [how, [(name, kind, base64.b64encode(data).decode()) for name, kind, data in given], text],
    )


def test_chosen_images_are_sent_as_they_are(page: Any, backend: Backend, files: list[Path]) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach images").click()
    assert chooser.value.is_multiple()
    chooser.value.set_files(files)
    expect(page.locator("#attached li")).to_have_count(2)
    assert attached(page) == ["one.png", "two.png"]
    expect(page.locator("#input")).to_be_focused()
    page.keyboard.type("which?")
    page.keyboard.press("Enter")
    answered(page, "You said: [2 images] which?")
    images = [{"type": "image_url", "image_url": {"url": url(path.read_bytes())}} for path in files]
    assert backend.asked[0]["messages"] == [{"role": "user", "content": [*images, {"type": "text", "text": "which?"}]}]
    expect(page.locator("#attached")).to_be_hidden()
    shown = page.locator(".user .pictures img")
    expect(shown).to_have_count(2)
    size = "images => images.map((image) => [image.naturalWidth, image.clientWidth / image.clientHeight])"
    expect(shown.first).to_have_js_property("complete", True)
    assert shown.evaluate_all(size) == [[40, 2], [40, 2]]  # shown, and not distorted


def test_an_image_can_be_taken_back(page: Any, backend: Backend, files: list[Path]) -> None:
    page.set_input_files("#files", files)
    page.get_by_role("button", name="Remove one.png").click()
    assert attached(page) == ["two.png"]
    page.get_by_role("button", name="Remove two.png").click()
    expect(page.locator("#attached")).to_be_hidden()
    expect(page.locator("#send")).to_be_disabled()
    page.set_input_files("#files", files[0])  # the same file can be chosen again
    expect(page.locator("#attached li")).to_have_count(1)


def test_an_image_alone_is_a_message(page: Any, backend: Backend, files: list[Path]) -> None:
    page.set_input_files("#files", files[0])
    expect(page.locator("#send")).to_be_enabled()
    page.click("#send")
    answered(page, "You said: [1 images]")
    (message,) = backend.asked[0]["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url"]
    expect(page.locator(".user .bubble")).to_have_count(0)
    expect(page.locator(".chat-title")).to_have_text("one.png")


@pytest.mark.parametrize("how", ["paste", "drop"])
def test_images_come_in_other_ways(page: Any, how: str) -> None:
    give(page, how, ("shot.png", "image/png", png(3)), ("b.png", "image/png", png(4)))
    expect(page.locator("#attached li")).to_have_count(2)
    assert attached(page) == ["shot.png", "b.png"]
    assert all(page.evaluate("window.taken"))
    assert page.locator("#main.dropping").count() == 0


def test_text_that_comes_with_a_picture_of_itself_is_text(page: Any) -> None:
    give(page, "paste", ("cell.png", "image/png", png(3)), text="4711")
    assert page.evaluate("window.taken") == [False]  # the browser pastes the text
    assert attached(page) == []


def test_other_files_are_refused_by_name(page: Any) -> None:
    give(page, "drop", ("a.pdf", "application/pdf", b"%PDF"), ("b.png", "image/png", png(1)))
    expect(page.locator("#attached li")).to_have_count(1)
    expect(page.locator("#notice span")).to_contain_text("a.pdf is no image that is read here")
    give(page, "drop", ("broken.png", "image/png", b"\x89PNG\r\n\x1a\nrubbish"))
    expect(page.locator("#notice span")).to_have_text("broken.png cannot be read.")
    give(page, "drop", ("large.png", "image/png", bytes(20 * 2**20 + 1)))
    expect(page.locator("#notice span")).to_contain_text("large.png has more than 20 MiB")
    assert attached(page) == ["b.png"]


def test_a_conversation_shows_its_images_again(page: Any, backend: Backend, files: list[Path]) -> None:
    """With the next message, and after the page was loaded anew."""
    page.set_input_files("#files", files[0])
    page.fill("#input", "first")
    page.press("#input", "Enter")
    answered(page, "You said: [1 images] first")
    page.reload()
    expect(page.locator(".user .pictures img")).to_have_js_property("naturalWidth", 40)
    expect(page.locator("#model-name")).to_have_text("nano-mtp")
    page.fill("#input", "second")
    page.press("#input", "Enter")
    answered(page, "You said: second")
    first, _, second = backend.asked[1]["messages"]
    assert first == backend.asked[0]["messages"][0]
    assert second["content"] == "second"
    stored = page.evaluate("Object.keys(localStorage).map((key) => localStorage.getItem(key)).join()")
    assert "one.png" in stored
    assert "base64" not in stored  # there would be room for few


def test_an_edited_message_keeps_its_images(page: Any, backend: Backend, files: list[Path]) -> None:
    """But those that are taken out: a server may have refused one."""
    page.set_input_files("#files", files)
    page.fill("#input", "first")
    page.press("#input", "Enter")
    answered(page, "You said: [2 images] first")
    page.locator(".user").hover()
    page.get_by_role("button", name="Edit").click()
    expect(page.locator(".user .pictures img")).to_have_count(2)
    page.get_by_label("Edit message").fill("again")
    page.get_by_label("Edit message").press("Enter")
    answered(page, "You said: [2 images] again")
    page.locator(".user").hover()
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Remove one.png").click()
    page.get_by_label("Edit message").press("Enter")
    answered(page, "You said: [1 images] again")
    image, _ = backend.asked[2]["messages"][0]["content"]
    assert image["image_url"]["url"] == url(files[1].read_bytes())


def test_images_of_deleted_chats_are_forgotten(page: Any, files: list[Path]) -> None:
    count = """() => new Promise((resolve) => {
      const opening = indexedDB.open("selfdraft");
      opening.onsuccess = () => {
        const all = opening.result.transaction("pictures").objectStore("pictures").count();
        all.onsuccess = () => { opening.result.close(); resolve(all.result); };
      };
    })"""
    for path in files:
        page.click("#new-chat")
        page.set_input_files("#files", path)
        page.click("#send")
        answered(page, "You said: [1 images]")
    assert page.evaluate(count) == 2
    page.locator(".chat").first.hover()
    page.get_by_role("button", name="Delete two.png").click()
    page.get_by_role("button", name="Undo").click()  # it is not forgotten yet
    expect(page.locator(".user .pictures img")).to_have_js_property("naturalWidth", 40)
    page.get_by_role("button", name="Delete two.png").click()
    page.reload()
    for _ in range(100):  # the page forgets it in its own time
        if page.evaluate(count) == 1:
            break
        page.wait_for_timeout(100)
    assert page.evaluate(count) == 1
    page.evaluate("indexedDB.deleteDatabase('selfdraft')")
    page.reload()
    expect(page.locator(".pictures .gone")).to_have_text("one.png is not kept in this browser any more")


def test_nothing_is_offered_to_a_model_that_reads_text(browser: Any, files: list[Path]) -> None:
    with served(Backend().app()) as address, watched(browser, address) as page:
        expect(page.locator("#model-name")).to_have_text("nano-mtp")
        expect(page.locator("#attach")).to_be_hidden()
        give(page, "drop", ("b.png", "image/png", png(1)))
        expect(page.locator("#notice span")).to_have_text("This model reads text only.")
        assert attached(page) == []
        assert all(page.evaluate("window.taken"))  # or the browser would show the file in the page's place


@pytest.mark.parametrize("vision", [True, False])
def test_a_model_that_is_not_loaded_is_given_images(browser: Any, files: list[Path], vision: bool) -> None:
    """What it reads is not known before; once it is, the page goes by that."""
    backend = Backend()
    backend.loaded, backend.vision = False, vision
    with served(backend.app()) as address, watched(browser, address) as page:
        expect(page.locator("#attach")).to_be_visible()
        page.set_input_files("#files", files[0])
        page.click("#send")
        answered(page, "You said: [1 images]")
        expect(page.locator("#attach")).to_be_visible(visible=vision)
