"""Create the KV transfer backend of an engine: the named one, or the best that is installed."""

from __future__ import annotations

import logging

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.kv_transfer.checksums import ChecksumMode, Checksums
from dynamo_trtllm.kv_transfer.nixl import NixlBackend
from dynamo_trtllm.kv_transfer.tcp import TcpBackend
from dynamo_trtllm.kv_transfer.transfer_backend import TransferBackend
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.network.addresses import LOOPBACK

log = logging.getLogger(__name__)


def create_backend(
    name: str | None, config: WorkerConfig | None = None, *, kv_checksums: ChecksumMode = "auto"
) -> TransferBackend:
    """Create a backend.

    Args:
        name: "nixl" or "tcp"; None chooses nixl if it is installed, otherwise tcp.
        config: has the addresses for tcp. Without it, only processes on this host can connect.
        kv_checksums: see KV_CHECKSUMS.

    Raises:
        ConfigError: nixl is not installed, or the addresses have different families.
    """
    checksums = Checksums(kv_checksums)
    if name == "tcp":
        return _tcp(config, checksums)
    try:
        backend = NixlBackend(checksums)
    except ConfigError as exc:
        if name is not None:
            raise
        log.info("KV transfer backend: tcp (%s)", exc.message)
        return _tcp(config, checksums)
    if name is None:
        log.info("KV transfer backend: %s", backend.name)
    return backend


def _tcp(config: WorkerConfig | None, checksums: Checksums) -> TcpBackend:
    if config is None:
        return TcpBackend(checksums=checksums)
    advertised = config.kv_transfer_host or LOOPBACK
    bound = config.kv_transfer_bind_host or advertised
    # An IPv6 address contains a colon. A listener at :: also accepts IPv4 connections.
    is_same_family = (":" in bound) == (":" in advertised)
    if not is_same_family and bound != "::":
        raise ConfigError(
            f"KV transfer can't listen at {bound} and be reached at {advertised}: one is an IPv6"
            " address, the other is not. Give --kv-transfer-bind-host and --kv-transfer-host of"
            " one family, or listen at ::",
            field="kv_transfer_bind_host",
        )
    return TcpBackend(bound, advertised, checksums)
