"""Servers for clients: the demo deployment, and a stand-in whose answers are scripted."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.clients.scripted_model import Script, serving
from tests.kit.cluster import TINY, Cluster


@pytest.fixture(scope="session")
def demo_url(etcd_server: str, nats_server: str) -> Iterator[str]:
    """Serve tiny-gpt-oss by a prefill and a decode worker. Yield the URL of the frontend."""
    cluster = Cluster(etcd_server, nats_server, f"clients-{secrets.token_hex(4)}")
    try:
        for role in ("prefill", "decode"):
            cluster.torch(role)
        cluster.until_ready(TINY)
        yield cluster.frontend.url()
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def scripted() -> Iterator[tuple[str, Script]]:
    """Serve the stand-in. Yield its URL, and the script in which a test sets the answers."""
    with serving() as served:
        yield served
