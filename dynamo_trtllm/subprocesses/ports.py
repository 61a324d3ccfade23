"""Find free ports for servers that need their port before they start. The ports are not reserved.

They lie below those that Linux uses for outgoing connections (`net.ipv4.ip_local_port_range`, from 32768 on). A port
of that range could be taken before its server listens, or before a restarted one listens again.
"""

from __future__ import annotations

import random
import socket

from dynamo_trtllm.errors import ConfigError

_PORTS = range(20_000, 32_000)
_TRIES = 200


def free_ports(count: int = 1, host: str = "127.0.0.1") -> int:
    """Return the first of `count` consecutive free ports of `host`.

    Raises:
        ConfigError: no such ports are free.
    """
    for _ in range(_TRIES):
        first = random.choice(_PORTS[: len(_PORTS) - count + 1])
        if all(_is_free(host, first + n) for n in range(count)):
            return first
    raise ConfigError(
        f"no {count} consecutive free ports from {_PORTS[0]} to {_PORTS[-1]} at {host}; stop programs that use them"
    )


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
