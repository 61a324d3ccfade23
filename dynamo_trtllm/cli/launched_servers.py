"""Connect commands to the servers of a deployment that was launched on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.launch.running_deployments import LaunchRecord

C = TypeVar("C", bound=ConnectionConfig)


def with_servers_of(config: C, record: LaunchRecord) -> C:
    """Return the settings with the addresses and users of a deployment that was launched here."""
    launched: dict[str, object] = {
        "namespace": record.namespace,
        "etcd_endpoints": record.etcd,
        "nats_server": record.nats,
    }
    if record.etcd_credentials_file:
        launched["etcd_credentials_file"] = Path(record.etcd_credentials_file)
    if record.nats_credentials_file:
        launched["nats_credentials_file"] = Path(record.nats_credentials_file)
    return config.model_copy(update=launched)
