"""The chat page in a real Chromium, against a scripted server. Each test also sees that the console stays clean and
that no request leaves for anywhere else (chromium.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from .chromium import browser_api, launched, watched
from .page_backend import Backend, Step, served

expect = browser_api().expect
THINKING: list[Step] = [("think", "Let me see."), ("hold",), ("text", "**Done**"), ("text", " now.")]
CODE: list[Step] = [("text", "```python\nprint(1)\nprint(2)\n```\n\nafter")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def page(browser: Any, backend: Backend) -> Iterator[Any]:
    """The page, open. `page.expected` matches the console errors a test provokes."""
    with served(backend.app()) as address, watched(browser, address) as page:
        yield page
        backend.held = False


def send(page: Any, text: str) -> None:
    expect(page.locator("#model-name")).to_have_text("nano-mtp")
    page.fill("#input", text)
    page.press("#input", "Enter")


def answered(page: Any, text: str) -> Any:
    """The last answer, once it is complete and reads `text`."""
    last = page.locator(".answer").last
    expect(last).to_have_attribute("data-status", "done")
    expect(last.locator(".markdown")).to_have_text(text)
    return last


def test_a_message_is_answered(page: Any, backend: Backend) -> None:
    expect(page.locator("#empty")).to_be_visible()
    send(page, "hello *you*")
    last = answered(page, "You said: hello you")
    assert last.locator(".markdown em").inner_text() == "you"
    expect(page.locator("#empty")).to_be_hidden()
    expect(page.locator("#announcer")).to_have_text("You said: hello you")
    assert backend.asked[0] == {
        "model": "nano-mtp",
        "depth": "auto",
        "messages": [{"role": "user", "content": "hello *you*"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings_per_token": True,
    }


def test_an_answer_streams_with_its_thinking_and_figures(page: Any, backend: Backend) -> None:
    backend.scripts["think"] = THINKING
    send(page, "think")
    thinking = page.locator("details.thinking")
    expect(thinking).to_have_attribute("open", "")
    expect(thinking.locator("summary")).to_have_text(re.compile(r"Thinking, \d+ s"))
    expect(page.locator(".figures")).to_contain_text("41.8 tok/s")
    expect(page.locator(".figures")).to_contain_text("2.85 tokens per cycle")
    bars = page.locator(".acceptance")
    expect(bars).to_have_attribute("aria-label", "Accepted by draft position: 1: 93%, 2: 71%, 3: 50%")
    heights = bars.locator(".fill").evaluate_all("fills => fills.map((fill) => fill.offsetHeight)")
    assert heights[0] > heights[1] > heights[2] > 0
    backend.held = False
    answered(page, "Done now.")
    expect(thinking).not_to_have_attribute("open", "")
    expect(thinking.locator("summary")).to_have_text(re.compile(r"Thought for \d+\.\d s"))
    expect(page.locator(".figures")).to_contain_text("26 tokens")
    expect(page.locator(".figures")).to_contain_text("prompt 512, 480 cached, 0.31 s")


def test_long_thinking_is_not_laid_out_for_every_token(page: Any, backend: Backend) -> None:
    backend.scripts["think"] = [("think", f"word{number} ") for number in range(600)] + [("text", "so")]
    page.evaluate(
        """() => {
          window.changes = 0;
          const ours = ({target}) => target.className === "thoughts";
          const count = (records) => { window.changes += records.filter(ours).length };
          new MutationObserver(count).observe(document.querySelector("#messages"), {subtree: true, childList: true});
        }"""
    )
    send(page, "think")
    answered(page, "so")
    expect(page.locator(".thoughts")).to_contain_text("word599")
    assert 0 < page.evaluate("window.changes") < 200


@pytest.mark.parametrize("how", ["button", "escape"])
def test_an_answer_can_be_stopped(page: Any, backend: Backend, how: str) -> None:
    backend.scripts["go"] = [("text", "so far"), ("hold",), ("text", " and on")]
    send(page, "go")
    expect(page.locator(".markdown")).to_have_text("so far")
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".answer")).to_have_attribute("data-status", "stopped")
    expect(page.locator(".note")).to_have_text("Stopped before the end.")
    expect(page.locator("#send")).to_be_visible()
    for _ in range(100):  # the server hears of it a moment later, on a busy machine many
        if backend.cancelled:
            break
        page.wait_for_timeout(100)
    assert backend.cancelled == 1
    send(page, "next")
    answered(page, "You said: next")
    assert [message["content"] for message in backend.asked[1]["messages"]] == ["go", "so far", "next"]


def test_regenerate_asks_again(page: Any, backend: Backend) -> None:
    send(page, "once")
    answered(page, "You said: once")
    backend.scripts["once"] = [("text", "Another answer")]
    page.get_by_role("button", name="Regenerate").click()
    answered(page, "Another answer")
    assert page.locator(".message").count() == 2
    assert backend.asked[0] == backend.asked[1]


def test_edit_cuts_the_chat_and_asks_again(page: Any, backend: Backend) -> None:
    for text in ("first", "second"):
        send(page, text)
        answered(page, f"You said: {text}")
    first = page.locator(".user").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    area = page.get_by_label("Edit message")
    expect(area).to_be_focused()
    area.press("Escape")
    expect(area).to_be_hidden()
    assert page.locator(".message").count() == 4
    first.get_by_role("button", name="Edit").click()
    area.fill("changed")
    area.press("Enter")
    answered(page, "You said: changed")
    assert page.locator(".message").count() == 2
    assert backend.asked[-1]["messages"] == [{"role": "user", "content": "changed"}]


def test_chats_are_kept_named_and_deleted(page: Any) -> None:
    send(page, "the first")
    answered(page, "You said: the first")
    page.get_by_role("button", name="New chat").click()
    send(page, "the second")
    answered(page, "You said: the second")
    titles = page.locator(".chat-title")
    page.locator(".chat").nth(1).hover()
    page.get_by_role("button", name="Rename the first").click()
    page.get_by_label("Name of the chat").fill("Renamed")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["the second", "Renamed"])
    page.reload()
    expect(titles).to_have_text(["the second", "Renamed"])
    answered(page, "You said: the second")
    titles.nth(1).click()
    answered(page, "You said: the first")
    page.locator(".chat").nth(1).hover()
    page.get_by_role("button", name="Delete Renamed").click()
    expect(titles).to_have_text(["the second"])
    page.get_by_role("button", name="Undo").click()
    expect(titles).to_have_text(["the second", "Renamed"])
    answered(page, "You said: the first")


def test_an_answer_goes_on_while_another_chat_is_open(page: Any, backend: Backend) -> None:
    backend.scripts["slow"] = THINKING
    send(page, "slow")
    expect(page.locator("details.thinking")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    send(page, "quick")
    answered(page, "You said: quick")
    expect(page.get_by_role("img", name="answering")).to_have_count(1)
    backend.held = False
    expect(page.get_by_role("img", name="answering")).to_have_count(0)
    page.locator(".chat-title", has_text="slow").click()
    answered(page, "Done now.")


def test_code_is_copied(page: Any, backend: Backend) -> None:
    backend.scripts["code"] = CODE
    send(page, "code")
    expect(page.locator(".code-bar span").first).to_have_text("python")
    page.get_by_role("button", name="Copy code").click()
    expect(page.locator(".copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)\nprint(2)"


def test_blocks_that_do_not_change_stay_in_place(page: Any, backend: Backend) -> None:
    """A selection or a focused button in a finished block must survive the pieces that follow."""
    backend.scripts["code"] = [*CODE, ("hold",), ("text", " more\n\nend")]
    send(page, "code")
    expect(page.locator(".markdown p")).to_have_text("after")
    page.focus(".copy-code")
    backend.held = False
    expect(page.locator(".markdown p")).to_have_text(["after more", "end"])
    expect(page.locator(".copy-code")).to_be_focused()


def test_hostile_answers_are_inert(page: Any, backend: Backend) -> None:
    attack = (
        "<img src=https://evil.example/x onerror='document.title=1'><script>document.title=2</script>"
        "[a](javascript:document.title=3) ![b](https://evil.example/y.png)\n\n"
        '```"><img/src/onerror=alert(1)>\n<script>document.title=4</script>\n```\n'
    )
    backend.scripts["<b>attack</b>"] = [("think", attack), ("text", attack)]
    send(page, "<b>attack</b>")
    last = page.locator(".answer").last
    expect(last).to_have_attribute("data-status", "done")
    expect(last.locator(".code-block")).to_be_visible()
    assert page.locator("#messages :is(img, script, b, iframe)").count() == 3  # the bold figures
    assert page.locator("#messages a").evaluate_all("links => links.map((link) => link.protocol)") == ["https:"]
    expect(page).to_have_title("<b>attack</b> – Selfdraft")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([("text", "Half"), ("error", "Logits are NaN; restart.")], ["Half", "Logits are NaN; restart."]),
        ([("text", "Half"), ("cut",)], ["Half", "The connection ended before the answer did."]),
        ([("refuse", 400, "The prompt has 9000 tokens, the model takes 4096.")], ["9000 tokens", "then retry"]),
        ([("refuse", 429, "Queue full.")], ["Queue full.", "Try again in a moment."]),
        ([("refuse", 413, "No room.")], ["No room.", "start a new chat"]),
    ],
)
def test_a_failure_is_told_and_can_be_retried(page: Any, backend: Backend, steps: list[Step], words: list[str]) -> None:
    page.expected = "status of 4"
    backend.scripts["try"] = steps
    send(page, "try")
    expect(page.get_by_role("alert")).to_be_visible()
    for word in words:
        expect(page.locator(".answer")).to_contain_text(word)
    del backend.scripts["try"]
    page.get_by_role("button", name="Retry").click()
    answered(page, "You said: try")
    assert page.locator(".message").count() == 2


def test_a_server_that_loads_or_is_gone_is_shown_and_found_again(page: Any, backend: Backend) -> None:
    page.expected = "status of 503|ERR_FAILED"
    backend.health = "loading"
    page.reload()
    expect(page.locator("#server-loading")).to_be_visible()
    page.fill("#input", "early")
    expect(page.locator("#send")).to_be_disabled()
    page.route("**/health", lambda route: route.abort())
    expect(page.locator("#server-gone")).to_be_visible()
    expect(page.locator("#server-loading")).to_be_hidden()
    backend.health = "ok"
    page.unroute("**/health")
    expect(page.locator("#server-gone")).to_be_hidden()
    page.press("#input", "Enter")
    answered(page, "You said: early")


def test_a_model_that_could_not_be_loaded_is_told(page: Any, backend: Backend) -> None:
    page.expected = "status of 503"
    backend.health = "failed"
    page.reload()
    expect(page.locator("#server-failed")).to_be_visible()
    expect(page.locator("#server-failed")).to_contain_text("weights are missing. Start the server again.")
    expect(page.locator("#server-loading")).to_be_hidden()


def test_two_tabs_show_one_chat_and_only_one_writes_it(page: Any, backend: Backend) -> None:
    backend.scripts["slow"] = [("text", "Some"), ("hold",), ("text", " more")]
    other = page.context.new_page()
    other.goto("/")
    send(page, "slow")
    other.locator(".chat-title", has_text="slow").click()
    answer = other.locator(".answer")
    expect(answer).to_have_attribute("data-status", "streaming")
    send(other, "me too")
    expect(other.locator("#notice")).to_contain_text("Another tab is answering in this chat")
    expect(other.locator("#input")).to_have_value("me too")
    backend.held = False
    expect(answer).to_have_attribute("data-status", "done")
    expect(answer.locator(".markdown")).to_have_text("Some more")
    other.press("#input", "Enter")
    answered(other, "You said: me too")
    answered(page, "You said: me too")
    backend.held = True
    send(page, "slow")
    expect(answer).to_have_count(3)
    expect(answer.last).to_have_attribute("data-status", "streaming")
    page.reload()
    expect(answer.last).to_have_attribute("data-status", "stopped")


def test_a_key_is_asked_for_and_kept_for_the_tab(page: Any, backend: Backend) -> None:
    page.expected = "status of 401"
    backend.key = "secret"
    page.reload()
    page.get_by_role("textbox", name="API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_text("The server refused that key.")).to_be_visible()
    page.get_by_role("textbox", name="API key").fill("secret")
    page.keyboard.press("Enter")
    send(page, "hi")
    answered(page, "You said: hi")
    page.reload()
    expect(page.locator("#model-name")).to_have_text("nano-mtp")
    expect(page.locator("#key-dialog")).to_be_hidden()
    assert "secret" not in page.evaluate("JSON.stringify({...localStorage})")


def test_a_key_that_was_not_given_is_asked_for_when_it_is_needed(page: Any, backend: Backend) -> None:
    page.expected = "status of 401"
    backend.key = "secret"
    page.reload()
    dialog, key = page.locator("#key-dialog"), page.get_by_role("textbox", name="API key")
    for entered in ("wrong", "wrong"):
        key.fill(entered)
        page.keyboard.press("Enter")
        expect(page.locator("#key-wrong")).to_be_visible()
    key.press("Escape")
    page.fill("#input", "hi")
    page.press("#input", "Enter")
    expect(dialog).to_be_visible()
    expect(page.locator("#key-wrong")).to_be_hidden()
    key.press("Escape")
    expect(page.locator("#notice")).to_contain_text("API key")
    page.press("#input", "Enter")
    key.fill("secret")
    page.keyboard.press("Enter")
    answered(page, "You said: hi")
    expect(page.locator("#model-name")).to_have_text("nano-mtp")
    assert [asked["model"] for asked in backend.asked] == ["nano-mtp"]


def test_settings_reach_the_request_and_bad_ones_do_not(page: Any, backend: Backend) -> None:
    page.click("#open-panel")
    page.get_by_label("System prompt of this chat").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Top p").fill("3")
    page.get_by_label("Draft depth").fill("2")
    page.get_by_label("Thinking").select_option("off")
    expect(page.get_by_text("Not used:")).to_have_count(1)
    page.keyboard.press("Escape")
    send(page, "hi")
    answered(page, "You said: hi")
    asked = backend.asked[0]
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: asked.get(name) for name in ("temperature", "seed", "top_p", "depth", "enable_thinking")} == {
        "temperature": 0.5,
        "seed": 7,
        "top_p": None,
        "depth": 2,
        "enable_thinking": False,
    }
    page.reload()
    page.click("#open-panel")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")
    page.get_by_role("button", name="Back to the defaults").click()
    expect(page.get_by_label("Temperature")).to_have_value("")


def test_rubbish_and_a_full_storage_do_not_break_the_page(page: Any) -> None:
    page.evaluate(
        """() => {
          localStorage.setItem("selfdraft.settings", "[");
          localStorage.setItem("selfdraft.theme", "{");
          const chats = {a: "{", b: "null", c: "3", d: '{"id": "d", "messages": [null, {}]}'};
          for (const [id, text] of Object.entries(chats)) localStorage.setItem("selfdraft.chat." + id, text);
        }"""
    )
    page.reload()
    expect(page.locator(".chat-title")).to_have_text(["New chat"])
    page.evaluate(
        "() => { Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') } }"
    )
    send(page, "still")
    answered(page, "You said: still")
    expect(page.locator("#notice")).to_contain_text("This browser cannot keep more")


def test_the_theme_follows_the_system_until_it_is_chosen(page: Any) -> None:
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.click("#theme")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_a_phone_has_no_sideways_scroll(page: Any, backend: Backend) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    wide = "x" * 300
    backend.scripts[wide] = [
        ("text", f"{wide}\n\n```\n{wide}\n```\n\n|{'a|' * 30}\n|{'-|' * 30}\n|{'b|' * 30}\n"),
        *THINKING,
    ]
    backend.held = False
    send(page, wide)
    expect(page.locator(".answer")).to_have_attribute("data-status", "done")
    expect(page.locator(".markdown table")).to_be_visible()
    for element in ("document.documentElement", "document.querySelector('#conversation')"):
        assert page.evaluate(f"{element}.scrollWidth - {element}.clientWidth") == 0
    expect(page.get_by_role("button", name="New chat")).to_be_hidden()
    page.get_by_role("button", name="Chats").click()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.locator("#empty")).to_be_visible()
    page.get_by_role("button", name="Settings").click()
    box = page.locator("#panel").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


def tab_to(page: Any, name: str, key: str = "Tab") -> None:
    """Moves the focus on until it is on what is called `name`."""
    said = "(node) => node.getAttribute('aria-label') || node.textContent.trim()"
    for _ in range(40):
        page.keyboard.press(key)
        focused = page.locator("*:focus")
        if focused.count() and focused.first.evaluate(said) == name:
            outline = focused.first.evaluate("(node) => getComputedStyle(node).outlineStyle")
            assert name == "Message" or outline != "none", f"the focus on {name} cannot be seen"
            return
    raise AssertionError(f"{name} cannot be reached with {key}")


def test_everything_works_by_keyboard(page: Any, backend: Backend) -> None:
    expect(page.locator("#model-name")).to_have_text("nano-mtp")
    backend.scripts["one\ntwo"] = CODE
    expect(page.locator("#input")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_have_attribute("data-status", "done")
    expect(page.locator("#input")).to_be_focused()
    for name in ("Regenerate", "Copy", "Copy code", "Edit", "Settings", "Light or dark", "Delete one", "New chat"):
        tab_to(page, name, "Shift+Tab")
    tab_to(page, "Settings")
    page.keyboard.press("Enter")
    expect(page.locator("#panel")).to_be_visible()
    tab_to(page, "Back to the defaults")
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    tab_to(page, "Edit")
    page.keyboard.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("three")
    page.keyboard.press("Enter")
    answered(page, "You said: three")
    tab_to(page, "Delete three", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#empty")).to_be_visible()
    tab_to(page, "Undo")
    page.keyboard.press("Enter")
    answered(page, "You said: three")


def test_reading_back_is_not_disturbed_by_new_text(page: Any, backend: Backend) -> None:
    lines = "\n\n".join(f"line {number}" for number in range(80))
    backend.scripts["long"] = [("text", lines), ("hold",), ("text", "\n\nlast\n\nline")]
    send(page, "long")
    expect(page.get_by_text("line 79", exact=True)).to_be_in_viewport()
    page.locator("#conversation").hover()
    page.mouse.wheel(0, -600)
    expect(page.locator("#to-end")).to_be_visible()
    backend.held = False
    expect(page.locator(".answer")).to_have_attribute("data-status", "done")
    expect(page.get_by_text("last", exact=True)).not_to_be_in_viewport()
    page.click("#to-end")
    expect(page.get_by_text("last", exact=True)).to_be_in_viewport()
