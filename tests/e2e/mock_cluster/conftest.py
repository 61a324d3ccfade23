"""One cluster with the mock engine, for all tests of this folder, which run in one process."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.kit.cluster import Cluster


@pytest.fixture(scope="package")
def mock_cluster(etcd_server: str, nats_server: str) -> Iterator[Cluster]:
    """Start a shared cluster with prefill and decode workers of the mock engine.

    Tests must not break it. It ends with the last test of this folder: idle processes take CPU
    time from the tests of other folders.
    """
    cluster = Cluster(etcd_server, nats_server, f"mock-{secrets.token_hex(4)}")
    try:
        for role in ("prefill", "decode"):
            # a short lease costs 1 % of a core per worker
            cluster.mock(role, "mock", "--lease-ttl-s", "10")
        cluster.until_ready("mock")
        yield cluster
    finally:
        cluster.stop()
