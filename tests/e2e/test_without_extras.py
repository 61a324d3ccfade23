"""Frontends, workers and every `--help` without the packages of extras.

tests/kit/bare_wheel.py hides them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.bare_wheel import hide_extras, of_extras
from tests.kit.cluster import Cluster

ROOT = Path(__file__).parents[2]
# Runs each command in a process of its own, which begins with what all of them import.
_EVERY_HELP = """
import os, sys
from dynamo_trtllm.cli import console
import dynamo_trtllm.config.load
for words in [[name, "--help"] for name in console.COMMANDS] + [["chaos", "--list"], ["--help"]]:
    sys.stdout.write("\\n== " + " ".join(words) + "\\n")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        sys.argv = ["dynamo-trtllm", *words]
        console.main()
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit("failed: " + " ".join(words))
"""


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Hide the packages of extras from the processes of a test. Return their modules."""
    hide_extras(tmp_path)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return of_extras()


def test_every_help_and_list_works_without_extras(bare: list[str]) -> None:
    assert {"rich", "shtab", "psutil", "torch", "transformers", "matplotlib"} & set(bare)
    assert not {"pydantic", "msgspec", "yaml"} & set(bare)
    done = subprocess.run(
        [sys.executable, "-c", _EVERY_HELP], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert done.stderr == ""
    parts = re.split(r"\n== (.*)\n", done.stdout)[1:]
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    assert all(text.strip() for text in said.values())
    assert "kill-decode" in said["chaos --list"]


def test_cluster_when_extras_are_not_installed_then_it_serves(
    bare: list[str], make_cluster: Callable[..., Cluster]
) -> None:
    cluster = make_cluster()
    cluster.mock("prefill_and_decode", "mock")
    cluster.until_ready("mock")
    body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with cluster.client() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
