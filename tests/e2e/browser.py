"""Opens pages in headless Chromium, and notes what a page should not do."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_WAIT_MS = 40_000


@dataclass
class OpenPage:
    """A page, the errors in its console, and the addresses that it asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)


def require_browser() -> str:
    """Return the path of a browser. Skip the test if there is none, or no Playwright."""
    pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no browser; install chromium (Debian: chromium-headless-shell)")
    return path


@contextmanager
def open_page(**options: Any) -> Iterator[OpenPage]:
    """Open an empty page.

    Args:
        options: of Playwright's `new_page`, such as `viewport` and `color_scheme`.
    """
    path = require_browser()
    sync_api = importlib.import_module("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(**options)
        page.set_default_timeout(_WAIT_MS)
        opened = OpenPage(page)
        page.on("pageerror", lambda error: opened.errors.append(str(error)))
        page.on(
            "console",
            lambda message: opened.errors.append(message.text) if message.type == "error" else None,
        )
        page.on("request", lambda request: opened.addresses.append(request.url))
        try:
            yield opened
        finally:
            browser.close()
