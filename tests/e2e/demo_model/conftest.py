"""The demo model by real processes, one cluster of them for all tests of this folder, which run in
one process.

The worker that serves aggregated requests is the example of a worker inside another program.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.demo_model.torch_cluster import AGGREGATED, TorchCluster
from tests.kit.cluster import PLAIN, TINY, Cluster, Process

EXAMPLE = Path(__file__).parents[3] / "examples" / "embedded_torch.py"


@pytest.fixture(scope="package")
def torch_cluster(etcd_server: str, nats_server: str) -> Iterator[TorchCluster]:
    """The demo model twice: by a prefill and a decode worker, and by the example under another
    name.

    The cluster ends with the last test of this folder: idle processes take CPU time from the tests
    of other folders.
    """
    cluster = Cluster(etcd_server, nats_server, f"torch-{secrets.token_hex(4)}")
    try:
        workers = TorchCluster(
            cluster=cluster,
            prefill=cluster.torch("prefill"),
            decode=cluster.torch("decode"),
            aggregated=_start_example(cluster),
        )
        cluster.until_ready(TINY, AGGREGATED)
        _measure(workers)
        yield workers
    finally:
        cluster.stop()


def _start_example(cluster: Cluster) -> Process:
    flags = {
        "--etcd-endpoints": "ETCD_ENDPOINTS",
        "--nats-server": "NATS_SERVER",
        "--namespace": "DYN_NAMESPACE",
    }
    argv = [text for flag, name in flags.items() for text in (flag, cluster.env[name])]
    return cluster.script([sys.executable, str(EXAMPLE)], argv)


def _measure(torch: TorchCluster) -> None:
    """Before the tests: they may use what takes more, such as guided decoding, which keeps a
    tokenizer of 80 MB.
    """
    with torch.cluster.client() as client:
        for name in (TINY, AGGREGATED):
            body = {
                "model": name,
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 20,
            }
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    processes = {"prefill": torch.prefill, "decode": torch.decode, "aggregated": torch.aggregated}
    processes["frontend"] = torch.cluster.frontend
    torch.resident_bytes.update(
        {role: psutil.Process(p.pid).memory_info().rss for role, p in processes.items()}
    )


@pytest.fixture
def tiny(torch_cluster: TorchCluster) -> Iterator[httpx.Client]:
    """A client of the frontend that serves the demo model."""
    with torch_cluster.cluster.client() as client:
        yield client


@pytest.fixture(scope="module")
def sdk(torch_cluster: TorchCluster) -> Iterator[openai.OpenAI]:
    """The same, by OpenAI's SDK."""
    with openai.DefaultHttpxClient(**PLAIN) as http:
        yield openai.OpenAI(**_of(torch_cluster), http_client=http)


@pytest.fixture
async def async_sdk(torch_cluster: TorchCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.DefaultAsyncHttpxClient(**PLAIN) as http:
        yield openai.AsyncOpenAI(**_of(torch_cluster), http_client=http)


def _of(torch: TorchCluster) -> dict[str, Any]:
    return {"base_url": f"{torch.cluster.frontend.url()}/v1", "api_key": "none", "max_retries": 0}
