"""Measures what the console costs the browser that shows it, and the frontend, under a steady load.

    python -m benchmarks.console_page
    python -m benchmarks.console_page --rate 50 --seconds 60

Starts workers of the mock engine, one prefill and one decode, and opens the console in headless
Chromium. It needs Playwright (`pip install playwright`) and a Chromium of this machine.

The load runs twice, first without the page and then with it.

  browser_cores    CPU of all processes of the browser
  frontend_cores   CPU of the frontend, without the page and with it
  frames           longest and 99th percentile of the time between two frames of the page, in ms
  long_tasks       pieces of work of the page that took more than 50 ms
  heap_mb          memory of the page's objects after the first ten seconds, and at the end
  errors           of the page and of requests
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .deployment import FRONTEND
from .gpu.plan import MODEL_NAME
from .load_client import Client, Load
from .simulated import MockDeployment, MockWorker

if TYPE_CHECKING:
    import psutil

_BROWSERS: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_ENGINE: Final = {"step_s": 0.005, "kv_cache_blocks": 1 << 16, "max_batch_size": 512}
_SETTLE_S: Final = 10.0  # of load before a measurement begins
# Notes the times between frames, and work that delays them.
_OBSERVE: Final = """
window.frames_ms = []; window.long_tasks = 0;
new PerformanceObserver(list => { window.long_tasks += list.getEntries().length; })
  .observe({entryTypes: ["longtask"]});
let last = performance.now();
const frame = now => {
  window.frames_ms.push(now - last);
  last = now;
  requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
"""


class Usage(NamedTuple):
    """CPU time of the frontend and of the browser, and failed requests."""

    frontend_cores: float
    browser_cores: float
    num_failed: int


@contextmanager
def _open_page(url: str, errors: list[str]) -> Iterator[Any]:
    """Open the console in a browser of this machine. Append the errors of the page to a list."""
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    try:
        sync_api = importlib.import_module("playwright.sync_api")
    except ImportError as exc:
        raise SystemExit("Playwright is missing: pip install playwright") from exc
    if path is None:
        raise SystemExit("there is no Chromium; Debian has it as chromium-headless-shell")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        page.goto(url)
        page.wait_for_selector("#main:not([hidden])")
        try:
            yield page
        finally:
            browser.close()


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _load(url: str, rate: float, seconds: float) -> Load:
    return Load(url=url, model=MODEL_NAME, rate=rate, requests=int(rate * seconds), isl=64, osl=32)


def _measure(load: Load, frontend: list[psutil.Process], browser: list[psutil.Process]) -> Usage:
    """Run a load, and measure what the frontend and the browser use meanwhile."""
    client = Client(load)
    begun_s = time.monotonic()
    frontend_s = _cpu_s(frontend)
    browser_s = _cpu_s(browser)
    # In another thread, because Playwright has an event loop in this one.
    with ThreadPoolExecutor(1) as pool:
        records = pool.submit(asyncio.run, client.run()).result()
    wall_s = time.monotonic() - begun_s
    return Usage(
        frontend_cores=(_cpu_s(frontend) - frontend_s) / wall_s,
        browser_cores=(_cpu_s(browser) - browser_s) / wall_s,
        num_failed=sum(not record.is_ok for record in records),
    )


def _browser_processes() -> list[psutil.Process]:
    import psutil

    own = psutil.Process().children(recursive=True)
    return [process for process in own if "chrom" in process.name()]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.console_page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rate", type=float, default=50.0, help="requests per second (default: 50)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of each load (default: 60)"
    )
    args = parser.parse_args()
    deployment = MockDeployment([MockWorker(mode, _ENGINE) for mode in ("prefill", "decode")])
    errors: list[str] = []
    try:
        deployment.start()
        frontend = [deployment.process(FRONTEND)]
        url = deployment.url
        _measure(_load(url, args.rate, _SETTLE_S), frontend, [])
        without = _measure(_load(url, args.rate, args.seconds), frontend, [])
        with _open_page(url, errors) as page:
            _measure(_load(url, args.rate, _SETTLE_S), frontend, [])
            heap_before = page.evaluate("performance.memory.usedJSHeapSize")
            page.evaluate(_OBSERVE)
            shown = _measure(_load(url, args.rate, args.seconds), frontend, _browser_processes())
            frames_ms = sorted(page.evaluate("window.frames_ms"))
            long_tasks = page.evaluate("window.long_tasks")
            slow_ms = frames_ms[len(frames_ms) * 99 // 100]
            heap_after = page.evaluate("performance.memory.usedJSHeapSize")
    finally:
        deployment.stop()
    sys.stdout.write(
        f"browser_cores {shown.browser_cores:.2f}\n"
        f"frontend_cores {without.frontend_cores:.3f} {shown.frontend_cores:.3f}\n"
        f"frames {frames_ms[-1]:.0f} {slow_ms:.0f} ({len(frames_ms)} frames)\n"
        f"long_tasks {long_tasks}\n"
        f"heap_mb {heap_before / 1e6:.1f} {heap_after / 1e6:.1f}\n"
        f"errors {len(errors)} {without.num_failed + shown.num_failed}\n"
    )
    for text in errors[:5]:
        sys.stdout.write(f"  {text}\n")


if __name__ == "__main__":
    main()
