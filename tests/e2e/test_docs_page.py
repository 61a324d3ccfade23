"""`/docs` in a real browser: what it lays out is what `/openapi.json` tells.

Needs chromium (`--extra`).
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
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


def summaries(page: str) -> list[str]:
    return [
        html.unescape(summary)
        for summary in re.findall(r"<summary>(.*?)</summary>", page, re.DOTALL)
    ]
