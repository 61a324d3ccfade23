"""The process of a frontend ends, whatever its middleware and routes leave behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.waiting import SOON_S

PROGRAM = """
import asyncio, os, signal, sys, threading, time, urllib.request
from dynamo_trtllm import Frontend, FrontendConfig
from dynamo_trtllm.support import exit_limit

signals = [getattr(signal, name) for name in sys.argv[1:]]
if len(signals) == 1:
    exit_limit.EXIT_S = 0.05
else:
    exit_limit.FORCED_EXIT_S = 0.05

def block():  # as a client of a database without time limit
    for number in signals:
        os.kill(os.getpid(), number)
        time.sleep(0.05)  # two signals at once are delivered as one
    threading.Event().wait()

async def route(request):
    await asyncio.to_thread(block)

def ask():
    asyncio.run(frontend.ready())
    urllib.request.urlopen(frontend.url + "/x")

settings = {"nats_server": "inproc://", "etcd_endpoints": "memory://", "http_port": 0}
config = FrontendConfig(http_host="127.0.0.1", **settings)
frontend = Frontend(config, routes={"GET /x": route}, hook_timeout_s=0.1)
threading.Thread(target=ask, daemon=True).start()
frontend.run()
"""


@pytest.mark.parametrize(("signals", "status"), [(["SIGTERM"], 0), (["SIGINT", "SIGINT"], 1)])
def test_frontend_exits_though_a_route_waits_for_a_thread(signals: list[str], status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *signals],
        capture_output=True,
        text=True,
        timeout=3 * SOON_S,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "the exit of this process hangs" in done.stderr
