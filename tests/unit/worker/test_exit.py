"""A worker's process ends, whatever engines and libraries do when it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.waiting import SOON_S

LIBRARY_HANGS = """
import threading
from dynamo_trtllm.protocol.errors import ConfigError, EngineFailed
from dynamo_trtllm.support import exit_limit
from dynamo_trtllm.worker import main as worker_main
from dynamo_trtllm.worker.worker import Worker

async def serve(worker):
    threading._register_atexit(threading.Event().wait)  # waits for a rank that is lost
    {end}

Worker.serve, exit_limit.EXIT_S = serve, 0.05
worker_main.main(["--engine", "mock", "--model-path", "m"])
"""
ENGINE_HANGS = """
import asyncio, os, signal, sys, threading, time
from dynamo_trtllm import Worker, WorkerConfig
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.support import exit_limit

method, hang, num_signals = sys.argv[1], sys.argv[2], int(sys.argv[3])
if num_signals == 1:
    exit_limit.EXIT_S = 0.05
else:
    exit_limit.FORCED_EXIT_S = 0.05

def send_signal():
    os.kill(os.getpid(), signal.SIGTERM)

def block():
    if method == "start" or num_signals == 2:
        send_signal()
    time.sleep(100)

async def hangs(engine):
    if hang == "blocks":
        block()
    if hang == "waits for a thread":
        await asyncio.to_thread(block)
    send_signal()
    while True:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            send_signal()

def send_when_ready():
    asyncio.run(worker.ready())
    send_signal()

setattr(MockEngine, method, hangs)
settings = {"nats_server": "inproc://", "etcd_endpoints": "memory://", "engine": "mock"}
worker = Worker(WorkerConfig(model_path="tiny-gpt-oss", **settings))
if method == "aclose":
    threading.Thread(target=send_when_ready).start()
worker.run()
"""


def end_of(program: str, *arguments: str) -> tuple[int, str]:
    """Return exit status and log of a program."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=3 * SOON_S,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("raise EngineFailed('no executor')", 1), ("raise ConfigError('no model')", 2)],
)
def test_process_exits_though_a_library_hangs(end: str, status: int) -> None:
    ended, log = end_of(LIBRARY_HANGS.format(end=end))
    assert ended == status, log
    assert "the exit of this process hangs" in log


@pytest.mark.parametrize(
    ("method", "hang", "num_signals", "status"),
    [
        ("start", "waits for a thread", "1", 0),
        ("start", "ignores cancellation", "2", 1),
        ("aclose", "waits for a thread", "1", 0),
        ("aclose", "waits for a thread", "2", 1),
        ("aclose", "ignores cancellation", "2", 1),
        ("aclose", "blocks", "1", 0),
    ],
)
def test_process_exits_though_an_engine_hangs(
    method: str, hang: str, num_signals: str, status: int
) -> None:
    ended, log = end_of(ENGINE_HANGS, method, hang, num_signals)
    assert ended == status, log
    assert "the exit of this process hangs" in log


ENGINE_CALLS_EXIT = """
import asyncio, sys
from dynamo_trtllm import Worker, WorkerConfig
from dynamo_trtllm.engines.mock.engine import MockEngine

async def start(engine):
    await asyncio.to_thread(sys.exit, 0)

MockEngine.start = start
settings = {"nats_server": "inproc://", "etcd_endpoints": "memory://", "engine": "mock"}
Worker(WorkerConfig(model_path="tiny-gpt-oss", **settings)).run()
"""


def test_process_fails_with_a_log_if_its_engine_calls_sys_exit() -> None:
    ended, log = end_of(ENGINE_CALLS_EXIT)
    assert ended == 1
    assert "shutting down: an engine or a library called sys.exit(0)" in log
    assert "in start" in log  # the traceback
