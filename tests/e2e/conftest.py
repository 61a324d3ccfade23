"""Clusters that a test may break. Those that tests share are in folders of their own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.kit.cluster import Cluster


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
