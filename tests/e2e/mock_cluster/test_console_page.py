"""The console in a real browser (`--extra`).

Needs chromium and Playwright: `pip install playwright`, without its own browsers.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.browser import OpenPage, open_page, require_browser
from tests.kit.cluster import PLAIN, TINY, Cluster

LAPTOP = {"width": 1366, "height": 768}
PHONE = {"width": 390, "height": 844}
WAIT_S = 40.0
QUESTION = "Hey, quick check: is everything up and running?"

pytestmark = [pytest.mark.extra, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _browser() -> None:
    """Skip before a cluster starts."""
    require_browser()


@contextmanager
def load(cluster: Cluster, model: str) -> Iterator[None]:
    """Send requests one after the other from two threads meanwhile."""
    over = threading.Event()
    url = f"{cluster.frontend.url()}/v1/completions"
    body = {"model": model, "prompt": "Hi " * 50, "max_tokens": 20, "ignore_eos": True}

    def ask() -> None:
        with httpx.Client(timeout=30.0, **PLAIN) as client:
            while not over.is_set():
                client.post(url, json=body)  # may fail while a worker is gone

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def check(opened: OpenPage, cluster: Cluster) -> None:
    """Check that the page had no errors, and asked no other host."""
    own = urlsplit(cluster.frontend.url()).netloc
    others = {urlsplit(url).netloc for url in opened.addresses if not url.startswith("data:")}
    assert others == {own}
    assert opened.errors == []


def expect(page: Any, script: str) -> None:
    """Wait until a JavaScript expression is true.

    Playwright's own `wait_for_function` evaluates text, which the page's policy forbids.
    """
    deadline = time.monotonic() + WAIT_S
    while not page.evaluate(f"Boolean({script})"):
        assert time.monotonic() < deadline, script
        page.wait_for_timeout(100)


def test_charts_move_and_requests_show_their_timelines(mock_cluster: Cluster) -> None:
    with open_page(viewport=LAPTOP) as opened, load(mock_cluster, "mock"):
        page = opened.page
        page.goto(mock_cluster.frontend.url())
        expect(page, "document.querySelectorAll('.worker-card.good').length === 2")
        curve = "(document.querySelector('.chart path.curve')?.getAttribute('d') || '')"
        expect(page, f"{curve}.length > 20")
        before = page.evaluate(curve)
        expect(page, f"{curve} !== {before!r}")
        status = page.evaluate("document.querySelector('#status').textContent")
        assert status in ("Healthy", "Needs attention")
        page.locator(".request").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(".details td:text('received')")
        assert "kv fetched" in page.inner_text(".details")
        page.locator(".request[aria-expanded=true]").click()
        card = page.locator(".column.decode .worker-card").first
        card.get_by_role("button").click()
        worker = card.get_attribute("data-worker")
        expect(page, "!document.querySelector('#of-worker').hidden")
        shown = page.locator(".request .worker").all_inner_texts()
        assert shown
        assert set(shown) == {worker}
        check(opened, mock_cluster)


def test_killed_worker_is_red_and_its_successor_green(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    cluster.mock("prefill", "mock")
    decode = cluster.mock("decode", "mock")
    cluster.until_ready("mock")
    killed = decode.instance()
    with open_page(viewport=LAPTOP) as opened:
        page = opened.page
        page.goto(cluster.frontend.url())
        expect(page, "document.querySelector('#health').className.includes('healthy')")
        decode.send(signal.SIGKILL)
        page.wait_for_selector(f".worker-card.gone[data-worker='{killed}']")
        expect(page, "document.querySelector('#health').className.includes('not_ready')")
        assert "no decode worker" in page.inner_text("#reasons")
        successor = cluster.mock("decode", "mock").instance()
        page.wait_for_selector(f".worker-card.good[data-worker='{successor}']")
        expect(page, "!document.querySelector('.worker-card.gone')")
        expect(page, "document.querySelector('#health').className.includes('healthy')")
        check(opened, cluster)


def test_page_when_the_frontend_restarts_then_it_connects_again(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster()
    cluster.mock("prefill", "mock")
    cluster.mock("decode", "mock")
    cluster.until_ready("mock")
    url = cluster.frontend.url()
    with open_page(viewport=PHONE, color_scheme="dark") as opened:
        page = opened.page
        page.goto(url)
        expect(page, "document.querySelector('.connection.live')")
        cluster.frontend.stop()
        page.wait_for_selector("#notice:not([hidden])")
        assert "Connecting again" in page.inner_text("#notice")
        port = str(urlsplit(url).port)
        again = cluster._start("dynamo_trtllm.frontend", ["--http-port", port])
        again.url()
        expect(page, "document.querySelector('.connection.live')")
        expect(page, "document.querySelector('#notice').hidden")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_key_is_asked_for_and_a_wrong_one_is_named(make_cluster: Callable[..., Cluster]) -> None:
    key = "sk-0123456789abcdef"
    cluster = make_cluster(flags=["--api-key", key])
    with open_page(viewport=LAPTOP) as opened:
        page = opened.page
        page.goto(cluster.frontend.url())
        page.wait_for_selector("#key-form:not([hidden])")
        assert "needs an API key" in page.inner_text("#key-reason")
        page.fill("#key", "sk-wrong-wrong-wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-reason:text('is not valid')")
        page.fill("#key", key)
        page.keyboard.press("Enter")
        expect(page, "document.querySelector('.connection.live')")
        assert page.is_hidden("#key-form")


def test_chat_shows_reasoning_a_tool_call_and_its_phases(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster()
    for role in ("prefill", "decode"):
        cluster.torch(role)
    cluster.until_ready(TINY)
    with open_page(viewport=LAPTOP) as opened:
        page = opened.page
        page.goto(cluster.frontend.url())
        expect(page, "document.querySelector('#chat-model').value")
        page.check("#chat-tools")
        page.fill("#chat-text", QUESTION)
        page.press("#chat-text", "Enter")
        page.wait_for_selector(".tool-call:has-text('get_system_health')")
        page.wait_for_selector(".message .bar")
        page.fill(".tool-call input", '{"status":"ok","uptime_seconds":372045}')
        page.press(".tool-call input", "Enter")
        page.wait_for_selector(".message.assistant >> nth=1 >> text=up and running")
        page.wait_for_selector(".message.assistant .reasoning:not([hidden])", state="attached")
        page.click("text=Timeline >> nth=0")
        page.wait_for_selector(".message td:text('received')")
        check(opened, cluster)


def test_chat_when_cleared_drops_the_answer_in_progress(mock_cluster: Cluster) -> None:
    with open_page(viewport=LAPTOP) as opened:
        page = opened.page
        page.goto(mock_cluster.frontend.url())
        expect(page, "document.querySelector('#chat-model').value")
        page.fill("#chat-text", QUESTION)
        page.press("#chat-text", "Enter")
        expect(page, "document.querySelector('.message.assistant > .text')?.textContent")
        page.click("#chat-clear")
        expect(page, "document.querySelector('#chat-stop').hidden")
        page.fill("#chat-text", "Hi")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.press("#chat-text", "Enter")
        assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Hi"}]
        check(opened, mock_cluster)
