"""Find the address at which other hosts reach this one, and resolve host names. No socket stays open."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from dynamo_trtllm.errors import ConfigError

_log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
_ANY_PORT = 4222  # for a URL without a port; nothing is sent to it


def address_towards(urls: Iterable[str]) -> str:
    """Return this host's IP address on the route to the first of `urls` that is not routed over loopback.

    Return 127.0.0.1 if there is no such URL. Nothing is sent to the URLs. The call blocks while names are resolved.
    """
    for url in urls:
        parts = urlsplit(url.strip() if "//" in url else f"//{url.strip()}")
        try:
            target = socket.getaddrinfo(parts.hostname, parts.port or _ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
                probe.connect(target[4])  # chooses a route
                address = ipaddress.ip_address(probe.getsockname()[0])
        except (OSError, ValueError) as exc:
            _log.warning("no local address on the route to %s: %s", parts.hostname, exc)
            continue
        if not address.is_loopback and not (address.version == 6 and address.is_link_local):
            return str(address)
    return LOOPBACK


def resolve_host(host: str) -> str:
    """Return the first IP address of an address or host name. May block while the name is resolved.

    Raises:
        ConfigError: the name has no address.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as exc:
        raise ConfigError(f"host name {host!r} can't be resolved ({exc.strerror}); pass an IP address") from exc


def is_wildcard(host: str) -> bool:
    """Return whether `host` is a wildcard or multicast address, to which other hosts can't connect."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("", "*")
    return address.is_unspecified or address.is_multicast
