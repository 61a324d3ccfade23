"""A frontend and a worker without the packages that only the command line and the launcher need."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster

# An import of these fails then, as if they were not installed.
_BLOCK = """
import sys
for name in ("rich", "rich_argparse", "shtab", "huggingface_hub"):
    sys.modules[name] = None
"""


def test_cluster_when_extras_are_not_installed_then_it_serves(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_BLOCK)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    cluster = make_cluster()
    cluster.mock("prefill_and_decode", "mock")
    cluster.until_ready("mock")
    body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with cluster.client() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
