"""Which carrier an engine uses: by name, or the best that is installed. Starts nothing."""

from __future__ import annotations

import logging

from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.handoff.base import Carrier
from dynamo_trtllm.handoff.checksums import ChecksumMode, Checksums
from dynamo_trtllm.handoff.loopback import LoopbackCarrier
from dynamo_trtllm.handoff.nixl import NixlCarrier
from dynamo_trtllm.handoff.tcp import TcpCarrier

_log = logging.getLogger(__name__)

CARRIERS = ("nixl", "tcp", "loopback")


def select_carrier(
    name: str | None,
    *,
    bind_host: str = "0.0.0.0",
    advertise_host: str = "127.0.0.1",
    kv_checksums: ChecksumMode = "auto",
) -> Carrier:
    """The carrier called `name`; None: nixl where it is installed, tcp otherwise. The hosts are for tcp.

    Raises ConfigError for an unknown name, or for nixl where it is not installed.
    """
    checksums = Checksums(kv_checksums)
    match name:
        case None:
            return _best(bind_host, advertise_host, checksums)
        case "nixl":
            return NixlCarrier(checksums)
        case "tcp":
            return TcpCarrier(bind_host, advertise_host, checksums)
        case "loopback":
            return LoopbackCarrier(checksums)
        case _:
            raise ConfigError(f"there is no carrier {name!r}; choose one of {', '.join(CARRIERS)}", field="carrier")


def _best(bind_host: str, advertise_host: str, checksums: Checksums) -> Carrier:
    try:
        carrier = NixlCarrier(checksums)
    except ConfigError as exc:
        _log.info("KV moves over carrier tcp: %s", exc.message)
        return TcpCarrier(bind_host, advertise_host, checksums)
    _log.info("KV moves over carrier %s", carrier.name)
    return carrier
