"""Markdown of the chat page: what it shows, and what it never lets through."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from selfdraft.server.page import process
from selfdraft.server.page.process import RenderProcess
from selfdraft.server.page.render import BUDGET, highlight_css, render

PLAIN_TAGS = "blockquote br code em h1 h2 h3 h4 h5 h6 hr li p s strong table tbody thead tr ul"
ALLOWED: dict[str, set[str]] = {
    "a": {"href", "title", "target", "rel"},
    "ol": {"start"},
    "pre": {"class", "data-language"},
    **{tag: {"class"} for tag in ("span", "td", "th")},
    **{tag: set() for tag in PLAIN_TAGS.split()},
}

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](&#x6a;avascript:alert(1))",
    "[x](javascript&colon;alert(1))",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](vbscript:msgbox)",
    "[x](//evil.example/)",
    "[x](/metrics)",
    "<javascript:alert(1)>",
    '<http://a.example/"onmouseover=alert(1)>',
    '[x](http://a.example "\\" onmouseover=alert(1) x=\\"")',
    "![x](http://a.example/?secret)",
    "![x](data:image/svg+xml,<svg onload=alert(1)>)",
    "[x]: javascript:alert(1)\n\n[x]",
    '```"><script>alert(1)</script>\nx\n```',
    "```html\n<script>alert(1)</script>\n```",
    '```x" onclick="alert(1)\n```',
    "`<img src=x onerror=alert(1)>`",
    "<a href='javascript:alert(1)'>x</a>",
    "<style>*{display:none}</style>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
    "|<b onclick=x>|\n|-|\n|<script>|",
    "<!--<img src='--><img src=x onerror=alert(1)>'>",
    "\x00<scr\x00ipt>alert(1)</script>",
    "# <base href=//evil.example>",
]


class Tags(HTMLParser):
    """All tags of a text with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def assert_safe(html: str) -> None:
    for tag, attributes in Tags(html).found:
        assert tag in ALLOWED, html
        assert set(attributes) <= ALLOWED[tag], html
        if tag == "a" and "href" in attributes:
            assert (attributes["href"] or "").lower().startswith(("http://", "https://", "mailto:")), html
            assert attributes["rel"] == "noopener noreferrer nofollow"
            assert attributes["target"] == "_blank"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_inert(text: str) -> None:
    assert_safe(render(text))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.sampled_from(HOSTILE), st.sampled_from(list("[]()<>`*_~|#-\n \"'&:!\\")), st.text()), max_size=12
    )
)
@example(["<", "script>"])
def test_no_text_gets_an_unknown_tag_through(parts: list[str]) -> None:
    assert_safe(render("".join(parts)))


def test_raw_html_is_shown_as_text() -> None:
    assert render("a <b>c</b> <!-- d -->") == "<p>a &lt;b&gt;c&lt;/b&gt; &lt;!-- d --&gt;</p>\n"


def test_what_models_write_is_rendered() -> None:
    html = render("## A\n\n3. **b**\n\n|x|y|\n|:-:|-:|\n|1|~~2~~|\n\n[c](https://d.example/?e=1&f=2)")
    assert "<h2>A</h2>" in html
    assert '<ol start="3">' in html
    assert "<strong>b</strong>" in html
    assert '<th class="align-center">x</th>' in html
    assert '<td class="align-right"><s>2</s></td>' in html
    assert 'href="https://d.example/?e=1&amp;f=2"' in html


def test_a_bare_address_and_a_relative_one_are_no_links() -> None:
    assert "<a" not in render("https://a.example [b](c.py)")


def test_code_is_coloured_and_keeps_its_text() -> None:
    html = render('```python title="x"\n\ndef f(): return "<b>"  \n```')
    assert '<pre class="highlight" data-language="python">' in html
    assert '<span class="k">def</span>' in html
    assert "&lt;b&gt;" in html
    assert "<code>\n" in html  # the empty first line is kept


@pytest.mark.parametrize("language", ["", "nosuchlanguage", "'><b>"])
def test_code_of_an_unknown_language_is_plain(language: str) -> None:
    html = render(f"```{language}\nif 1 < 2:\n```")
    assert "if 1 &lt; 2:" in html
    assert "<span" not in html


def test_an_unfinished_fence_is_code() -> None:
    assert "<pre" in render("text\n\n```js\nlet a")


def test_both_style_sheets_are_there() -> None:
    css = highlight_css()
    assert "\n.highlight .k {" in css
    assert ":root[data-theme=dark] .highlight .k {" in css


@pytest.fixture
def no_collection() -> Iterator[None]:
    """The time limit is an exception at any point; inside hypothesis's hook on the collector it would be a warning."""
    gc.disable()
    yield
    gc.enable()


# 20,000 characters in each: quadratic time shows, and the time limit keeps it short.
@pytest.mark.parametrize(
    "unit", ["[", ">", "> ", "- ", "*", "`", "<", "![", "[a](", "**a ", "[a][", "&", "|a", "a\n=\n", "[a]: x\n", "~~a"]
)
def test_time_is_bounded(unit: str, no_collection: None) -> None:
    started = time.thread_time()
    html = render(unit * (20_000 // len(unit)))
    assert time.thread_time() - started < 2 * BUDGET + 0.2
    assert_safe(html)


@pytest.mark.parametrize("unit", [">", "- ", "1. "])
def test_nothing_nested_deep_is_lost(unit: str) -> None:
    assert "the end" in render(unit * 500 + "the end")


def test_slow_colours_are_left_out_and_the_rest_is_rendered(no_collection: None) -> None:
    """The lexer of Java takes quadratic time on this."""
    html = render("**bold**\n\n```java\n" + "(" * 200_000 + "\n```")
    assert "<strong>bold</strong>" in html
    assert "<span" not in html


class TestProcess:
    def test_it_gives_what_render_gives(self) -> None:
        text = "**é** \u2028 `x`\n\n```python\n1\n```"
        assert RenderProcess().render(text) == render(text)

    def test_a_dead_process_costs_one_text_its_rendering(self) -> None:
        renderer = RenderProcess()
        renderer.render("a")
        assert renderer._child is not None
        renderer._child.kill()
        renderer._child.wait()
        assert renderer.render("**<b>**") == '<pre class="plain"><code>**&lt;b&gt;**</code></pre>'
        assert renderer.render("**b**") == "<p><strong>b</strong></p>\n"

    def test_a_silent_process_is_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        renderer = RenderProcess()
        renderer.render("a")
        monkeypatch.setattr(process, "PATIENCE", 0.0)
        assert renderer.render("*b*" * 100_000).startswith('<pre class="plain">')

    def test_it_ends_when_told_so_even_in_the_middle_of_a_text(self) -> None:
        renderer = RenderProcess()
        renderer.render("a")
        child = renderer._child
        assert child is not None
        child.send_signal(signal.SIGSTOP)  # it will not answer
        with ThreadPoolExecutor() as pool:
            shown = pool.submit(renderer.render, "*b*")
            while not renderer._lock.locked():
                time.sleep(0.001)
            begin = time.monotonic()
            renderer.close()
            assert time.monotonic() - begin < process.PATIENCE / 2
            assert shown.result() == '<pre class="plain"><code>*b*</code></pre>'
        assert child.poll() is not None
        assert renderer._child is None

    def test_it_ends_with_its_owner(self) -> None:
        renderer = RenderProcess()
        renderer.render("a")
        child = renderer._child
        assert child is not None
        del renderer
        assert child.poll() is not None
