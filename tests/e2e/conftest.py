"""Clusters for tests. Those of the demo model are in its folder."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.kit.cluster import Cluster


@pytest.fixture(scope="session")
def mock_cluster(etcd_server: str, nats_server: str) -> Iterator[Cluster]:
    """Start a shared cluster with prefill and decode workers of the mock engine.

    Tests must not break it.
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


@pytest.fixture
def make_cluster(etcd_server: str, nats_server: str) -> Iterator[Callable[..., Cluster]]:
    """Return a function that starts a cluster with only a frontend, which the test may break."""
    made: list[Cluster] = []

    def make(
        etcd: str = etcd_server, nats: str = nats_server, flags: Sequence[str] = ()
    ) -> Cluster:
        made.append(Cluster(etcd, nats, f"broken-{secrets.token_hex(4)}", flags))
        return made[-1]

    yield make
    for cluster in made:
        cluster.stop()
