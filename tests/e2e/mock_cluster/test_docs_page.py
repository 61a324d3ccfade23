"""`/docs` in a real browser: what it lays out is what `/openapi.json` tells.

Needs chromium (`--extra`).
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.browser import open_page, require_browser
from tests.kit.cluster import Cluster, until

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WAIT_S = 40.0
NOWHERE_ELSE = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@pytest.mark.extra
@pytest.mark.timeout(180)
def test_docs_page_shows_every_endpoint_and_schema(mock_cluster: Cluster, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser, "no browser here; install chromium (Debian: chromium-headless-shell)"
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    argv += [f"--host-resolver-rules={NOWHERE_ELSE}", "--virtual-time-budget=5000", "--dump-dom"]
    url = f"{mock_cluster.frontend.url()}/docs"
    done = subprocess.run([*argv, url], capture_output=True, text=True, timeout=40, check=True)
    with mock_cluster.client() as client:
        described = client.get("/openapi.json").json()
    shown = {
        tuple(re.findall(r"<code[^>]*>(.*?)</code>", summary)) for summary in summaries(done.stdout)
    }
    operations = {
        (method.upper(), path) for path, methods in described["paths"].items() for method in methods
    }
    assert operations <= shown
    assert {(name,) for name in described["components"]["schemas"]} == shown - operations
    assert "messages" in done.stdout
    assert 'class="bad">openapi.json' not in done.stdout


@pytest.mark.extra
@pytest.mark.timeout(180)
def test_page_asks_for_a_key_and_sends_an_example(make_cluster: Callable[..., Cluster]) -> None:
    require_browser()
    key = "sk-0123456789abcdef"
    cluster = make_cluster(flags=["--api-key", key])
    cluster.mock("prefill_and_decode", "mock")
    cluster.until_ready()
    headers = {"Authorization": f"Bearer {key}"}
    with cluster.client() as client:
        ready = "/v1/models/mock/ready"
        until(lambda: client.get(ready, headers=headers).status_code == 200, WAIT_S)
    with open_page() as opened:
        page = opened.page
        page.goto(f"{cluster.frontend.url()}/docs")
        page.wait_for_selector("text=this server needs an API key: enter one above")
        opened.errors.clear()  # the browser notes the status 401
        page.fill("#key", key)
        page.keyboard.press("Enter")
        chat = page.locator("details", has_text="Create the next message of a conversation.").first
        chat.locator("summary").click()
        assert '"model": "mock"' in chat.locator("textarea").input_value()
        assert "Bearer $KEY" in chat.inner_text()
        assert key not in page.content()
        chat.locator("button", has_text="Send").click()
        page.wait_for_selector("text=data: [DONE]")
        assert chat.locator("pre").last.inner_text().startswith("200 after ")
        models = page.locator("details", has_text="List the available models.").first
        models.locator("summary").click()
        models.locator("button", has_text="Send").click()
        page.wait_for_selector('text=/"object": "list"/')
        assert opened.errors == []


def summaries(page: str) -> list[str]:
    return [
        html.unescape(summary)
        for summary in re.findall(r"<summary>(.*?)</summary>", page, re.DOTALL)
    ]
