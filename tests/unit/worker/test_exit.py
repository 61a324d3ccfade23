"""A worker's process ends, whatever libraries do when the interpreter exits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.waiting import SOON_S

HANGING = """
import threading
from dynamo_trtllm.protocol.errors import ConfigError, EngineFailed
from dynamo_trtllm.worker import main as worker_main

class Worker:
    def __init__(self, config):
        pass

    def run(self):
        threading._register_atexit(threading.Event().wait)  # waits for a rank that is lost
        {end}

worker_main.Worker, worker_main.EXIT_S = Worker, 0.05
worker_main.main(["--engine", "mock", "--model-path", "m"])
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("raise EngineFailed('no executor')", 1), ("raise ConfigError('no model')", 2)],
)
def test_process_exits_though_a_library_hangs(end: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING.format(end=end)],
        capture_output=True,
        text=True,
        timeout=3 * SOON_S,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "hangs" in done.stderr
