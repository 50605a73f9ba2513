"""Chromium for tests of the pages: where it is, and a page that is watched. Knows Playwright; nothing of the pages."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.needs import lacking

try:
    from playwright import sync_api
except ImportError:
    sync_api = None  # type: ignore[assignment]

PATIENCE_MS = 90_000  # for a loaded machine; a passing test does not wait


def browser_api() -> Any:
    """Playwright's interface; the module that asks for it is skipped, or fails, where no browser can be had."""
    if sync_api is None:
        reason = "the playwright package is not installed (sh scripts/setup.sh test)"
    elif executable() is None:
        reason = "Chromium is not installed (apt-get install chromium)"
    else:
        return sync_api
    lacking(reason)


def executable() -> str | None:
    """Chromium, as a distribution or its maker installs it."""
    return shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def launched() -> Iterator[Any]:
    """A browser. CI runs as root in a container, where Chromium's own sandbox cannot start."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def watched(browser: Any, address: str) -> Iterator[Any]:
    """A page of a server, in a context of its own, and open at `/`.

    At the end its console is clean, but for what `page.expected` matches, and nothing was asked for elsewhere.
    """
    context = browser.new_context(base_url=address, viewport={"width": 1100, "height": 800})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.set_default_timeout(PATIENCE_MS)
    sync_api.expect.set_options(timeout=PATIENCE_MS)
    complaints: list[str] = []
    addresses: list[str] = []
    context.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    context.on("weberror", lambda error: complaints.append(str(error.error)))
    context.on("request", lambda request: addresses.append(request.url))
    page = context.new_page()
    page.expected = r"(?!)"
    page.goto("/")
    yield page
    context.close()
    assert [text for text in complaints if not re.search(page.expected, text)] == []
    assert [url for url in addresses if not url.startswith(address)] == []
