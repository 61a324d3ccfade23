"""Where NixlConnector listens for the handshake of decode engines: a reachable address and free ports.

vLLM 0.24.0 takes both from its environment, and counts the port among what compiled code depends on
(`envs.compile_factors`): one chosen anew at each start would have everything compiled anew. So both go to our connector
as configuration (`connector.py`), and the environment is only read. Opens no lasting socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.subprocesses.ports import free_ports

HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_KEYS = ("side_channel_host", "side_channel_port")


class SideChannel(NamedTuple):
    host: str
    port: int  # the first; every further data-parallel rank has the next


def choose(kv_transfer_host: str, ranks: int, environment: Mapping[str, str]) -> SideChannel:
    """As the environment has it; else free ports at `kv_transfer_host`, an address of this host that all workers reach.

    Raises ConfigError for a port that is none, and when no ports are free.
    """
    host = environment.get(HOST) or kv_transfer_host
    port = environment.get(PORT)
    if port is None:
        return SideChannel(host, free_ports(ranks, host))
    if not (port.isdecimal() and 0 < int(port) <= 65_536 - ranks):
        raise ConfigError(f"{PORT} is {port!r}: give the first of {ranks} ports in a row up to 65535, or none")
    return SideChannel(host, int(port))


def extra_config(channel: SideChannel) -> dict[str, Any]:
    """What carries it, in `kv_connector_extra_config`."""
    return dict(zip(_KEYS, channel, strict=True))


def listen_there(scheduler: Any, config: Any) -> None:
    """Tells the connector's scheduler, which opens its socket once KV caches are registered. `config`: a VllmConfig."""
    extra = config.kv_transfer_config.kv_connector_extra_config
    host, port = (extra[key] for key in _KEYS)
    scheduler.side_channel_host = host
    scheduler.side_channel_port = port + config.parallel_config.data_parallel_index
