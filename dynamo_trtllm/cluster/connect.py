"""Connect a worker or frontend to its cluster: to etcd and NATS, or to others in this process.

The clients of etcd and NATS are imported only if they are used.
"""

from __future__ import annotations

from collections.abc import Callable

from dynamo_trtllm.cluster.discovery.discovery_interface import Discovery
from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.support.background import BackgroundTasks


async def connect_plane(
    config: ConnectionConfig,
    limits: PlaneLimits,
    tasks: BackgroundTasks,
    on_unreadable: Callable[[], None],
) -> RequestPlane:
    """Connect to the request plane of `--nats-server`.

    Args:
        config: has the address, and the files with credentials and certificates.
        limits: time-outs of the plane.
        tasks: owner of the plane's background tasks.
        on_unreadable: called for each message that can't be read.

    Raises:
        ConfigError: a file of credentials or certificates can't be read.
        Unreachable: no NATS server answers in time, or it rejects this process.
    """
    if config.uses_inproc_plane:
        from dynamo_trtllm.cluster.request_plane.inproc import BUSES, InprocPlane

        return InprocPlane(limits, BUSES.at(config.nats_server), tasks, on_unreadable)
    from dynamo_trtllm.cluster.request_plane.nats import NatsPlane
    from dynamo_trtllm.cluster.request_plane.nats_connection import NatsAccess

    access = NatsAccess.of(config)
    return await NatsPlane.connect(config.nats_server, limits, tasks, on_unreadable, access=access)


def open_discovery(
    config: ConnectionConfig, tasks: BackgroundTasks, *, lease_ttl_s: float = 10.0
) -> Discovery:
    """Return the discovery of `--etcd-endpoints`. It connects to etcd when it is first used.

    Args:
        config: has the addresses and certificate files.
        tasks: owner of the background tasks.
        lease_ttl_s: seconds after which etcd removes an instance that does not renew its lease.

    Raises:
        ConfigError: the addresses or certificate files are invalid.
    """
    if config.uses_memory_discovery:
        from dynamo_trtllm.cluster.discovery.memory import RECORDS, MemoryDiscovery

        return MemoryDiscovery(RECORDS.at(config.etcd_endpoints))
    from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery

    return EtcdDiscovery(config, lease_ttl_s=lease_ttl_s, tasks=tasks)
