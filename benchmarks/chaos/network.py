"""A network for a deployment: two NATS servers with a route between them, and a relay in front of
one of them.

Workers connect to one server and the frontend to the other. The route can be cut while all clients
stay connected. Messages between the frontend and its server can be dropped or repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from dynamo_trtllm.cluster.request_plane.frames import Frame, read_batch
from dynamo_trtllm.protocol.errors import BadFrame
from dynamo_trtllm.protocol.messages import Chunk
from dynamo_trtllm.support.network.addresses import free_ports

from ..blocking import wait_for
from ..servers import Server
from .relay import Copies, NatsRelay, Relay

_CLUSTER = ("--cluster_name", "chaos")


class Network:
    """Two NATS servers with a route. Create it on the main thread and end it with `close`."""

    def __init__(self, folder: Path) -> None:
        ports = [free_ports(), free_ports()]
        self.workers = Server(
            "nats", folder / "w", ("--cluster", f"nats://127.0.0.1:{ports[0]}", *_CLUSTER)
        )
        self._route = wait_for(Relay.start(f"127.0.0.1:{ports[0]}"))
        routes = (
            "--cluster",
            f"nats://127.0.0.1:{ports[1]}",
            "--routes",
            f"nats://{self._route.address}",
        )
        self._frontend = Server("nats", folder / "f", (*routes, *_CLUSTER))
        self._relay = wait_for(NatsRelay.start(self._frontend.address))

    @property
    def frontend_address(self) -> str:
        """Return the NATS address for the frontend."""
        return f"nats://{self._relay.address}"

    def change(self, copies: Copies | None) -> None:
        """Set how often each message from and to the frontend is forwarded. None: once."""
        self._relay.copies = copies

    async def cut_route(self, seconds: float) -> None:
        """Cut the route between the servers for this long."""
        await asyncio.to_thread(wait_for, self._route.cut())
        await asyncio.sleep(seconds)
        await asyncio.to_thread(wait_for, self._route.mend())

    def close(self) -> None:
        for relay in (self._relay, self._route):
            wait_for(relay.cut())
        self._frontend.close()


class MessageDropper:
    """Drops every `nth` message with a `wanted` frame, starting with the first.

    `count` is the number dropped.
    """

    def __init__(self, wanted: Callable[[Frame], bool], nth: int) -> None:
        self._wanted = wanted
        self._nth = nth
        self._seen = 0
        self.count = 0

    def __call__(self, body: bytes) -> int:
        try:
            frames = read_batch(body, lambda error: None).frames
        except BadFrame:  # another kind of message
            return 1
        if not any(self._wanted(frame) for frame in frames):
            return 1
        self._seen += 1
        if self._seen % self._nth != 1:
            return 1
        self.count += 1
        return 0


def is_first(frame: Frame) -> bool:
    """Return whether the frame is the first of its stream."""
    return frame.number == 0


def is_last(frame: Frame) -> bool:
    """Return whether the frame ends its stream."""
    return isinstance(frame.chunk, Chunk) and frame.chunk.finish_reason is not None
