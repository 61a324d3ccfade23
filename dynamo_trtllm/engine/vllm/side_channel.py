"""Where NixlConnector listens for the handshake of decode engines: an address others can reach, ports nobody uses.

vLLM takes both from the environment only. Opens no lasting socket.
"""

from __future__ import annotations

import contextlib
import random
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from dynamo_trtllm.config import environ
from dynamo_trtllm.errors import EngineFailed

HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_LOWEST, _HIGHEST = 20000, 32000  # below what systems deal out of their own accord
_TRIES = 200


class SideChannel(NamedTuple):
    host: str
    port: int  # the first; every further data-parallel rank has the next


def export(control_plane: str, ranks: int) -> SideChannel:
    """Chooses and exports both, but for what the user has exported. `control_plane`: an address all workers reach."""
    host = environ.replace(HOST, address_towards(control_plane), wanted_by="the vllm engine")
    port = environ.replace(PORT, str(free_ports(host, ranks)), wanted_by="the vllm engine")
    return SideChannel(host, int(port))


def address_towards(url: str) -> str:
    """This host's address on the way to `url`; loopback when that is this host."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        family, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 4222, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            address = str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
    return address if address != "::1" else "127.0.0.1"


def free_ports(host: str, count: int) -> int:
    """The first of `count` neighboring ports that are free. Raises EngineFailed when there are none."""
    for _ in range(_TRIES):
        first = random.randrange(_LOWEST, _HIGHEST - count)
        if all(_is_free(host, first + n) for n in range(count)):
            return first
    raise EngineFailed(f"no {count} free neighboring ports from {_LOWEST} to {_HIGHEST} at {host}; set {PORT}")


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
