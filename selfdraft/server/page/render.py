"""Markdown of an answer as safe HTML. Knows the tags the page may show, and no model, no HTTP and no browser.

Run as a program it is the other end of process.py: a JSON string on each line of input is rendered to one on a line of
output. It stands alone, so that starting it imports nothing else of this project.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from types import FrameType
from typing import Any

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

__all__ = ["as_is", "highlight_css", "render"]

# CPU seconds for one attempt. Parsers and lexers take quadratic time, or worse, on some texts.
BUDGET = 0.4
MAX_LEVEL = 60
LINKS = ("http://", "https://", "mailto:")

_TAGS = "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul"
_ALIGNMENTS = {"align-left", "align-center", "align-right"}
_CLEANER = nh3.Cleaner(
    tags=set(_TAGS.split()),
    attributes={"a": {"href", "title"}, "ol": {"start"}, "pre": {"data-language"}},
    allowed_classes={
        "pre": {"highlight", "plain"},
        "span": set(STANDARD_TYPES.values()) - {""},
        "td": _ALIGNMENTS,
        "th": _ALIGNMENTS,
    },
    url_schemes={"http", "https", "mailto"},
    link_rel="noopener noreferrer nofollow",
    set_tag_attribute_values={"a": {"target": "_blank"}},
)


class _OutOfTime(BaseException):
    """Raised from a signal handler, so no library may take it for an error of its own."""


def render(text: str) -> str:
    """The HTML to show for `text`. Call it on the main thread: a timer signal bounds the time it takes.

    Raw HTML is shown as text, images become links, and only http, https and mailto links are links. When colouring the
    code takes too long it stays plain; a text that still takes too long, or nests too deep, comes back whole as it is.

    Args:
        text: Markdown (CommonMark with tables and strikethrough), complete or cut anywhere.

    Returns:
        HTML of allowed tags only, without scripts, styles, images and ids.
    """
    for colour in (True, False):
        try:
            with _time_limit(BUDGET):
                html = _html(text, colour)
        except _OutOfTime:
            continue
        return _CLEANER.clean(html)
    return as_is(text)


def as_is(text: str) -> str:
    """The HTML that shows `text` itself."""
    return f'<pre class="plain"><code>{escape(text)}</code></pre>'


def highlight_css() -> str:
    """The style sheet for highlighted code: light, and dark under `:root[data-theme=dark]`."""
    rules = []
    for style, where in (("default", ".highlight"), ("github-dark", ":root[data-theme=dark] .highlight")):
        formatter: HtmlFormatter[str] = HtmlFormatter(style=style, nobackground=True)
        rules.append(formatter.get_style_defs(where))  # type: ignore[no-untyped-call]
    return "\n".join(rules)


def _html(text: str, colour: bool) -> str:
    env = {"colour": colour}
    tokens = _MARKDOWN.parse(text, env)
    if any(token.level >= MAX_LEVEL - 1 for token in tokens):
        return as_is(text)  # the parser drops what is nested deeper
    for token in tokens:
        style = token.attrs.pop("style", None)  # alignment of table cells; the CSP forbids style attributes
        if style is not None:
            token.attrSet("class", str(style).replace("text-align:", "align-"))
    return str(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, env))


def _fence(renderer: Any, tokens: Sequence[Token], index: int, options: Any, env: dict[str, Any]) -> str:
    token = tokens[index]
    language = (token.info.split() or [""])[0][:40]
    body = _coloured(token.content, language) if env["colour"] else escape(token.content)
    return f'<pre class="highlight" data-language="{escape(language)}"><code>{body}</code></pre>\n'


def _coloured(code: str, language: str) -> str:
    """`code` as HTML with a class for each kind of token, if the language is known."""
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return escape(code)
    return highlight(code, lexer, HtmlFormatter(nowrap=True))


def _may_link(url: str) -> bool:
    return url.lower().startswith(LINKS)


def _parser() -> MarkdownIt:
    markdown = MarkdownIt("commonmark", {"html": False, "maxNesting": MAX_LEVEL})
    markdown.enable(["table", "strikethrough"]).disable(["image", "html_block", "html_inline"])
    markdown.validateLink = _may_link  # type: ignore[method-assign]
    markdown.add_render_rule("fence", _fence)
    return markdown


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.1)  # again, should a destructor have swallowed the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise _OutOfTime


_MARKDOWN = _parser()

if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(render(json.loads(line))), flush=True)
