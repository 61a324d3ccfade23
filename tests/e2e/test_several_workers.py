"""examples/several_workers.py: workers as processes of one Python program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.kit.cluster import TINY, Cluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "several_workers.py"


def test_workers_of_a_program_serve_and_end_together(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster()
    flags = {
        "--etcd-endpoints": "ETCD_ENDPOINTS",
        "--nats-server": "NATS_SERVER",
        "--namespace": "DYN_NAMESPACE",
    }
    argv = [word for flag, name in flags.items() for word in (flag, cluster.env[name])]
    program = cluster.script([sys.executable, str(EXAMPLE)], [TINY, "--engine", "mock", *argv])
    cluster.until_status(TINY, 200)
    body = {"model": TINY, "prompt": "Hi", "max_tokens": 2}
    with cluster.client() as client:
        assert client.post("/v1/completions", json=body).status_code == 200
    children = psutil.Process(program.pid).children()
    workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 2
    workers[0].kill()
    assert program.wait() == 1
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() for child in children)
