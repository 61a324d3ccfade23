"""A worker that joins the cluster with a model of its own: what its garbage collector looks at, and
how it leaves.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
import time

import pytest

from tests.kit.cluster import Cluster, Process, events
from tests.kit.waiting import SOON_S

pytestmark = pytest.mark.timeout(180)  # the first test also starts the cluster

NAME = f"another-{secrets.token_hex(4)}"
# The worker's main, which also writes how many objects are frozen when it registers.
COUNTING = """
import gc, sys
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.worker import main

register = EtcdDiscovery.register

async def counted(self, instance):
    print(f"frozen when it registers: {gc.get_freeze_count()}", file=sys.stderr, flush=True)
    return await register(self, instance)

EtcdDiscovery.register = counted
main.main()
"""


@pytest.fixture(scope="module")
def worker(mock_cluster: Cluster) -> Process:
    flags = ["--engine", "mock", "--model", "mock", "--served-model-name", NAME]
    flags += ["--override-engine-args", json.dumps({"step_s": 0.02})]
    flags += ["--disaggregation-mode", "prefill_and_decode", "--system-port", "0"]
    started = mock_cluster.script([sys.executable, "-c", COUNTING], flags)
    started.instance()
    mock_cluster.until_status(NAME, 200)
    return started


def test_worker_when_it_registers_then_what_was_loaded_is_frozen(worker: Process) -> None:
    frozen = worker.wait_for(r"frozen when it registers: (\d+)")
    assert int(frozen.group(1)) > 10_000  # with no engine's library


def test_worker_drains_if_its_terminal_closes_until_sigterm(
    worker: Process, mock_cluster: Cluster
) -> None:
    """The last test of this worker. A terminal that closes may send its signal twice."""
    body = {"model": NAME, "prompt": "Hello", "max_tokens": 2000, "stream": True}
    with (
        mock_cluster.client() as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        stream = events(answer.iter_lines())
        assert next(stream)
        worker.send(signal.SIGHUP)
        worker.wait_for(
            r"draining for \d+ s \(up to 30 s\): running requests: 1, pending KV transfers: 0"
        )
        worker.send(signal.SIGHUP)
        assert next(stream)
        begun = time.monotonic()
        worker.send(signal.SIGTERM)
        assert worker.wait() == 1
        assert time.monotonic() - begun < SOON_S  # it would else wait for 30 s
