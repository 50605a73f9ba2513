"""The chat page in a real Chromium, against the real server: the trained model, and refusals as they really come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import selfdraft
from selfdraft.llm import LLM

from .chromium import browser_api, launched, watched
from .conftest import Running, running, within

expect = browser_api().expect
KEY = "a-key-of-the-tests"
QUESTION = "Write a Python function that adds two numbers."
# What the figures said while the model was thinking, kept from inside the page: polling would miss it.
LIVE_FIGURES = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const text = document.querySelector('details[open] ~ .figures')?.textContent;
    if (text) window.seen.push(text);
  }).observe(document.querySelector('#messages'), {subtree: true, childList: true});
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def trained() -> Iterator[Running]:
    with running(lambda: selfdraft.load("reference")) as found:
        yield found


@pytest.fixture
def page(browser: Any, trained: Running) -> Iterator[Any]:
    with watched(browser, trained.url) as page:
        expect(page.locator("#model-name")).to_have_text("nano")
        yield page


def ask(page: Any, text: str, status: str = "done") -> Any:
    page.fill("#input", text)
    page.press("#input", "Enter")
    last = page.locator(".answer").last
    expect(last).to_have_attribute("data-status", status)
    return last


def settle(page: Any, settings: dict[str, str]) -> None:
    page.click("#open-panel")
    for label, value in settings.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Thinking").select_option("on")
    page.keyboard.press("Escape")


def test_a_trained_model_thinks_and_answers_with_code(page: Any) -> None:
    settle(page, {"Temperature": "0", "Draft depth": "4"})
    page.evaluate(LIVE_FIGURES)
    answer = ask(page, QUESTION)
    expect(answer.locator("details.thinking")).not_to_have_attribute("open", "")
    expect(answer.locator(".thoughts")).to_contain_text("adds two numbers")
    expect(answer.locator(".code-block code")).to_contain_text("return a + b")
    assert answer.locator(".code-block .highlight .nf").inner_text() == "add"
    answer.get_by_role("button", name="Copy code").click()
    expect(answer.locator(".copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("def add(a, b):\n    ")
    figures = answer.locator(".figures")
    expect(figures).to_contain_text("tok/s")
    expect(figures).to_contain_text("tokens per cycle")
    expect(figures.locator(".bar")).to_have_count(4)
    live = page.evaluate("window.seen")
    assert any("tokens per cycle" in text and "% accepted" in text for text in live), live
    code = answer.locator(".code-block code")
    first = code.text_content()
    page.reload()
    expect(code).to_have_text(first)
    answer.get_by_role("button", name="Regenerate").click()
    expect(answer).to_have_attribute("data-status", "streaming")
    expect(answer).to_have_attribute("data-status", "done")
    expect(code).to_have_text(first)


@pytest.mark.parametrize("how", ["button", "tab closed"])
def test_an_answer_given_up_frees_its_row(page: Any, trained: Running, how: str) -> None:
    def endless(route: Any) -> None:
        asked = {**json.loads(route.request.post_data), "ignore_eos": True, "max_tokens": 20_000}
        route.continue_(post_data=json.dumps(asked))

    page.route("**/v1/chat/completions", endless)
    answer = ask(page, "Tell me a story.", "streaming")
    expect(answer.locator(".markdown")).not_to_be_empty()
    assert trained.service.figures["running"] == 1
    if how == "button":
        page.click("#stop")
        expect(answer.locator(".note")).to_have_text("Stopped before the end.")
    else:
        page.close()
    assert trained.idle(10)


def test_markup_in_a_prompt_stays_text(page: Any) -> None:
    text = "<img src=https://evil.example/a onerror=alert(1)><script>alert(1)</script> ![x](https://evil.example/b)"
    settle(page, {"System prompt": text, "Longest answer": "8"})
    ask(page, text)
    assert page.locator(".bubble").inner_text() == text
    assert page.locator("#messages :is(img, script)").count() == 0


def test_refusals_of_the_real_server_are_told(browser: Any, load_nano: Callable[[], LLM]) -> None:
    with running(load_nano, api_key=KEY) as server, watched(browser, server.url) as page:
        page.expected = "status of 40[01]"
        page.get_by_role("textbox", name="API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#model-name")).to_have_text("nano")
        failure = ask(page, "word " * 5000, "failed").get_by_role("alert")
        expect(failure).to_contain_text("maximum context length is 4096")
        expect(failure).to_contain_text("Shorten the message, or start a new chat.")
        assert server.idle()


def test_a_server_that_loads_is_waited_for(browser: Any, load_nano: Callable[[], LLM]) -> None:
    loads = []

    def slowly() -> LLM:
        assert within(60, lambda: bool(loads))
        return load_nano()

    with running(slowly, ready=False) as server, watched(browser, server.url) as page:
        page.expected = "status of 503"
        expect(page.locator("#server-loading")).to_be_visible()
        page.fill("#input", "early")
        expect(page.locator("#send")).to_be_disabled()
        loads.append(True)
        expect(page.locator("#server-loading")).to_be_hidden()
        settle(page, {"Longest answer": "4"})
        page.click("#send")
        expect(page.locator(".answer")).to_have_attribute("data-status", "done")
