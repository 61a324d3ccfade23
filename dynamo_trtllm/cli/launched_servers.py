"""Connect commands to the servers of a deployment that was launched on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from dynamo_trtllm.config.config_base import DEFAULT_SOURCE, Config, ConnectionConfig
from dynamo_trtllm.launch.running_deployments import LaunchRecord, running_deployment
from dynamo_trtllm.protocol.errors import ConfigError

C = TypeVar("C", bound=ConnectionConfig)


def with_launched_servers(config: C, deployment_name: str | None, *, uses_nats: bool) -> C:
    """Return the settings with the servers of the deployment that was launched here.

    Settings that name a namespace or servers stay as they are, unless a deployment is named, too.
    So do those on a machine on which no deployment runs.

    Args:
        config: the settings.
        deployment_name: the name of the deployment. Default: the only one that runs.
        uses_nats: the command uses NATS, so an address of NATS counts, too.

    Raises:
        ConfigError: as for `running_deployment`, or flags name a deployment and servers.
    """
    addresses = ["namespace", "etcd_endpoints"]
    if uses_nats:
        addresses.append("nats_server")
    if names_servers(config, addresses):
        return config
    record = running_deployment(deployment_name, "with --deployment-name")
    # While the servers of the deployment start, it has no addresses yet.
    return with_servers_of(config, record) if record is not None and record.nats else config


def names_servers(config: Config, addresses: Sequence[str]) -> bool:
    """Return whether the settings name servers to use, in place of a deployment launched here.

    Flags win over the environment, also between a deployment's name and addresses: otherwise a
    command would change another deployment than the named one if ETCD_ENDPOINTS is set.

    Args:
        config: the settings; `deployment_name` is one of them.
        addresses: the settings that name servers.

    Raises:
        ConfigError: flags name both.
    """
    given = [name for name in addresses if config.source_of(name) != DEFAULT_SOURCE]
    chosen = config.source_of("deployment_name")
    if not given or chosen == DEFAULT_SOURCE:
        return bool(given)
    flags = [name for name in given if config.source_of(name).startswith("flag ")]
    if flags and chosen.startswith("flag "):
        flag = config.source_of(flags[0]).removeprefix("flag ")
        raise ConfigError(f"give --deployment-name or {flag}, not both")
    return bool(flags)


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
