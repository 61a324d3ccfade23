"""Derive settings from arguments, checkpoint and the built engine's configuration, with pure functions.

`config` is vLLM's `VllmConfig`; only plain attributes are read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_trtllm.engines.checkpoint import Checkpoint
from dynamo_trtllm.engines.vllm.args import VllmArgs
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import KvLayout, Role
from dynamo_trtllm.network.addresses import free_ports

HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_KEYS = ("side_channel_host", "side_channel_port")


class SideChannel(NamedTuple):
    """The address at which NixlConnector listens for handshakes."""

    host: str
    port: int  # of the first data-parallel rank; each further rank uses the next port


def choose(kv_transfer_host: str, ranks: int, environment: Mapping[str, str]) -> SideChannel:
    """Choose the side channel's address: from the environment, otherwise free ports at `kv_transfer_host`.

    Args:
        kv_transfer_host: An address of this host that all workers can reach.
        ranks: The number of data-parallel ranks, each of which needs a port.

    Raises:
        ConfigError: The environment has an invalid port, or no ports are free.
    """
    host = environment.get(HOST) or kv_transfer_host
    port = environment.get(PORT)
    if port is None:
        return SideChannel(host, free_ports(ranks, host))
    if not (port.isdecimal() and 0 < int(port) <= 65_536 - ranks):
        raise ConfigError(
            f"{PORT} is {port!r}; set it to the first of {ranks} consecutive ports up to 65535, or unset it"
        )
    return SideChannel(host, int(port))


def extra_config(channel: SideChannel) -> dict[str, Any]:
    """Return the entries of `kv_connector_extra_config` that pass the side channel to vLLM's processes."""
    return dict(zip(_KEYS, channel, strict=True))


def listen_there(scheduler: Any, config: Any) -> None:
    """Set the address in the connector's scheduler, which listens once KV caches are registered."""
    extra = config.kv_transfer_config.kv_connector_extra_config
    host, port = (extra[key] for key in _KEYS)
    scheduler.side_channel_host = host
    scheduler.side_channel_port = port + config.parallel_config.data_parallel_index


_log = logging.getLogger(__name__)


def engine_values(
    args: VllmArgs,
    folder: Path,
    channel: SideChannel | None,
    kv_events: Mapping[str, Any] | None = None,
    *,
    has_tokenizer: bool,
) -> dict[str, Any]:
    """Return the keyword arguments of AsyncEngineArgs.

    Args:
        channel: The side channel of an engine with KV transfers, otherwise None.
        kv_events: Where the engine publishes KV events, if it does: fields of `kv_events_config`.
        has_tokenizer: The model folder has a tokenizer. vLLM needs it for structured output only.
    """
    values = {**args.values, "model": str(folder), "skip_tokenizer_init": not has_tokenizer, "disable_log_stats": True}
    if channel is not None:
        transfer = values["kv_transfer_config"]
        extra = transfer["kv_connector_extra_config"] | extra_config(channel)
        values["kv_transfer_config"] = transfer | {"kv_connector_extra_config": extra}
    if kv_events is not None:
        values["kv_events_config"] = values["kv_events_config"] | kv_events
    return values


def layout(checkpoint: Checkpoint, config: Any) -> KvLayout:
    """Return the layout of the KV cache."""
    dtype = str(config.cache_config.cache_dtype)
    if dtype == "auto":
        dtype = str(config.model_config.dtype).removeprefix("torch.")
    return KvLayout(
        dtype="fp8" if dtype.startswith("fp8") else dtype,
        block_tokens=int(config.cache_config.block_size),
        num_layers=checkpoint.num_layers,
        num_kv_heads=checkpoint.num_kv_heads,
        head_dim=checkpoint.head_dim,
        tensor_parallel_size=int(config.parallel_config.tensor_parallel_size),
    )


def kv_compat(role: Role, checkpoint: Checkpoint, config: Any, release: str) -> dict[str, str]:
    """Return further values that must be equal at prefill and decode. NixlConnector's handshake compares them."""
    if role is Role.AGGREGATED:
        return {}
    return {
        "release": release,
        "model_folder": str(checkpoint.folder),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "attention_backend": str(config.attention_config.backend),
        "hybrid_kv_cache": str(not config.scheduler_config.disable_hybrid_kv_cache_manager),
    }
