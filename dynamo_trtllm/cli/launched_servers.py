"""Connect commands to the servers of a deployment that was launched on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from dynamo_trtllm.config.config_base import DEFAULT_SOURCE, ConnectionConfig
from dynamo_trtllm.launch.running_deployments import LaunchRecord, running_deployment

C = TypeVar("C", bound=ConnectionConfig)


def with_launched_servers(config: C, deployment_name: str | None, *, uses_nats: bool) -> C:
    """Return the settings with the servers of the deployment that was launched here.

    Settings that name a namespace or servers stay as they are, and so do those on a machine on
    which no deployment runs.

    Args:
        config: the settings.
        deployment_name: the name of the deployment. Default: the only one that runs.
        uses_nats: the command uses NATS, so an address of NATS counts, too.

    Raises:
        ConfigError: as for `running_deployment`.
    """
    addresses = ["namespace", "etcd_endpoints"]
    if uses_nats:
        addresses.append("nats_server")
    if any(config.source_of(name) != DEFAULT_SOURCE for name in addresses):
        return config
    record = running_deployment(deployment_name, "with --deployment-name")
    # While the servers of the deployment start, it has no addresses yet.
    return with_servers_of(config, record) if record is not None and record.nats else config


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
