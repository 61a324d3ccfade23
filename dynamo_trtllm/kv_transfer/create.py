"""Create the KV transfer backend of an engine: the named one, or the best that is installed."""

from __future__ import annotations

import logging

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.kv_transfer.base import TransferBackend
from dynamo_trtllm.kv_transfer.checksums import ChecksumMode, Checksums
from dynamo_trtllm.kv_transfer.loopback import LoopbackBackend
from dynamo_trtllm.kv_transfer.nixl import NixlBackend
from dynamo_trtllm.kv_transfer.tcp import TcpBackend
from dynamo_trtllm.network.addresses import LOOPBACK

log = logging.getLogger(__name__)

BACKENDS = ("nixl", "tcp", "loopback")


def create_backend(
    name: str | None, config: WorkerConfig | None = None, *, kv_checksums: ChecksumMode = "auto"
) -> TransferBackend:
    """Create the backend called `name`.

    Args:
        name: None chooses nixl if it is installed, otherwise tcp.
        config: Has the addresses for tcp. Without it, only processes on this host can connect.
        kv_checksums: See KV_CHECKSUMS.

    Raises:
        ConfigError: The name is unknown, nixl is not installed, or the addresses have different families.
    """
    checksums = Checksums(kv_checksums)
    match name:
        case None:
            return _best(config, checksums)
        case "nixl":
            return NixlBackend(checksums)
        case "tcp":
            return _tcp(config, checksums)
        case "loopback":
            return LoopbackBackend(checksums)
        case _:
            raise ConfigError(
                f"unknown transfer backend {name!r}; choose one of {', '.join(BACKENDS)}", field="transfer_backend"
            )


def _best(config: WorkerConfig | None, checksums: Checksums) -> TransferBackend:
    try:
        backend = NixlBackend(checksums)
    except ConfigError as exc:
        log.info("KV transfer backend: tcp (%s)", exc.message)
        return _tcp(config, checksums)
    log.info("KV transfer backend: %s", backend.name)
    return backend


def _tcp(config: WorkerConfig | None, checksums: Checksums) -> TcpBackend:
    if config is None:
        return TcpBackend(checksums=checksums)
    advertised = config.kv_transfer_host or LOOPBACK
    bound = config.kv_transfer_bind_host or advertised
    if (":" in bound) != (":" in advertised) and bound != "::":
        raise ConfigError(
            f"KV transfer can't listen at {bound} and be reached at {advertised}: one is an IPv6 address, the other is "
            "not. Give --kv-transfer-bind-host and --kv-transfer-host of one family, or listen at ::",
            field="kv_transfer_bind_host",
        )
    return TcpBackend(bound, advertised, checksums)
