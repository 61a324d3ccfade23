"""The garbage collector of a worker's process does not look at what its engine made while it
loaded.
"""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Callable

from tests.kit.cluster import TINY, Cluster

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


def test_worker_when_it_registers_then_what_was_loaded_is_frozen(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster()
    name = f"gc-{secrets.token_hex(4)}"
    flags = ["--engine", "mock", "--model", TINY, "--served-model-name", name]
    worker = cluster.script(
        [sys.executable, "-c", COUNTING],
        [*flags, "--disaggregation-mode", "prefill_and_decode", "--system-port", "0"],
    )
    frozen = worker.wait_for(r"frozen when it registers: (\d+)")
    assert int(frozen.group(1)) > 10_000  # with no engine's library
    worker.instance()
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
