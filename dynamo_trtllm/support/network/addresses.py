"""Find the address at which others reach a server, resolve host names, and find free ports.

Free ports are for servers that need their port before they start. They lie below those that Linux
uses for outgoing connections (`net.ipv4.ip_local_port_range`, from 32768 on). A port of that range
could be taken before its server listens, or before a restarted one listens again.
"""

from __future__ import annotations

import ipaddress
import logging
import random
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final
from urllib.parse import urlsplit

from dynamo_trtllm.protocol.errors import ConfigError

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_OF: Final = {"0.0.0.0": LOOPBACK, "::": "::1"}
_ANY_PORT = 4222  # the port of a URL without a port; nothing is sent to it


def is_loopback(host: str) -> bool:
    """Return whether an address or a host name is one that only this machine can connect to."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    # A socket for both families shows 127.0.0.1 as ::ffff:127.0.0.1.
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback if mapped is None else mapped.is_loopback


def address_towards(urls: Iterable[str]) -> str:
    """Return this host's IP address on the route to the first URL that is not on this host.

    Return 127.0.0.1 if there is no such URL. Nothing is sent to the URLs. The call blocks while
    names are resolved.
    """
    for url in urls:
        parts = urlsplit(url.strip() if "//" in url else f"//{url.strip()}")
        try:
            targets = socket.getaddrinfo(
                parts.hostname, parts.port or _ANY_PORT, type=socket.SOCK_DGRAM
            )
            family, _, _, _, target = targets[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # chooses a route
                address = ipaddress.ip_address(probe.getsockname()[0])
        except (OSError, ValueError) as exc:
            log.warning("no local address on the route to %s: %s", parts.hostname, exc)
            continue
        # An IPv6 address of one link means nothing to hosts that are not on it.
        is_of_one_link = address.version == 6 and address.is_link_local
        if not address.is_loopback and not is_of_one_link:
            return str(address)
    return LOOPBACK


def resolve_host(host: str, flag: str) -> str:
    """Return the first IP address of an address or host name, the value of `flag`.

    May block while it is resolved.

    Raises:
        ConfigError: the name has no address.
    """
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        _, _, _, _, socket_address = infos[0]
        return str(socket_address[0])
    except (OSError, UnicodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not a host name"
        raise ConfigError(f"{flag} {host!r} can't be resolved ({why}); pass an IP address") from exc


def is_wildcard(host: str) -> bool:
    """Return True for a wildcard or multicast address, to which other hosts can't connect."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("", "*")
    return address.is_unspecified or address.is_multicast


def connect_host(host: str) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    return _LOOPBACK_OF.get(host, host)


def host_and_port(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shown_address(host: str, port: int) -> str:
    """Return HOST:PORT for a user of this machine, of a server that listens on `host`."""
    is_local = host in (*_LOOPBACK_OF, LOOPBACK)
    return host_and_port("localhost" if is_local else host, port)


def http_url(host: str, port: int, path: str, *, uses_tls: bool = False) -> str:
    """Return the URL of a path of the server that listens on `host` and `port`."""
    scheme = "https" if uses_tls else "http"
    return f"{scheme}://{host_and_port(connect_host(host), port)}{path}"


def network_of(address: str) -> str:
    """Return the network that stands for a client.

    It is an IPv4 address, or the first 64 bits of an IPv6 address, because a single client can use
    all addresses that begin so. A text that is no IPv6 address is returned unchanged.
    """
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))


_PORTS = range(20_000, 32_000)
_TRIES = 200  # of random ports


@contextmanager
def reserved_ports(count: int = 1, host: str = LOOPBACK) -> Iterator[int]:
    """Reserve `count` consecutive free ports of `host`, and return the first one.

    Until the context ends, no other call gets these ports, in any process of this machine. A server
    that sets SO_REUSEADDR can listen on them, as etcd, NATS and asyncio's servers do.

    Raises:
        ConfigError: no such ports are free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first_ports = _PORTS[: len(_PORTS) - count + 1]
    for _ in range(_TRIES):
        first = random.choice(first_ports)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    reservation = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    # This fails for ports that others reserve or listen on.
                    reservation.bind((host, port))
                    # This lets a server bind. It is set only now, because two reservations with it
                    # could have the same port.
                    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            except OSError:
                continue
            yield first
            return
    raise ConfigError(
        f"no {count} consecutive free ports from {_PORTS[0]} to {_PORTS[-1]} at {host}; stop"
        " programs that use them"
    )


def free_ports(count: int = 1, host: str = LOOPBACK) -> int:
    """Return the first of `count` consecutive free ports of `host`, without a reservation.

    Raises:
        ConfigError: no such ports are free.
    """
    with reserved_ports(count, host) as first:
        return first
