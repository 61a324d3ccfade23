"""Clusters that tests share: one without weights. The demo model's is in its folder."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.e2e.cluster import Cluster


@pytest.fixture(scope="session")
def mock_cluster(etcd_server: str, nats_server: str) -> Iterator[Cluster]:
    """`mock` by a prefill and a decode worker of 5 ms steps: for tests that break nothing."""
    cluster = Cluster(etcd_server, nats_server, f"mock-{secrets.token_hex(4)}")
    try:
        cluster.mock("prefill", "mock")
        cluster.mock("decode", "mock")
        cluster.until_ready("mock")
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def make_cluster(etcd_server: str, nats_server: str) -> Iterator[Callable[..., Cluster]]:
    """Makes a cluster with a frontend alone, for a test that breaks it."""
    made: list[Cluster] = []

    def make(etcd: str = etcd_server, nats: str = nats_server, flags: Sequence[str] = ()) -> Cluster:
        made.append(Cluster(etcd, nats, f"broken-{secrets.token_hex(4)}", flags))
        return made[-1]

    yield make
    for cluster in made:
        cluster.stop()
