"""A stream's receiver whose events are read like a queue."""

from __future__ import annotations

import asyncio
import itertools

from dynamo_trtllm.cluster.request_plane.receivers import StreamDemux, StreamReceiver
from dynamo_trtllm.protocol.messages import Chunk
from dynamo_trtllm.protocol.streams import StreamEvent


class Arrivals(StreamReceiver):
    def __init__(self) -> None:
        self.events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self.ends: list[str] = []
        super().__init__(
            self.events.put_nowait,
            set(),
            lambda: self.ends.append("end"),
            lambda *, awaits_kv: self.ends.append("cancel"),
        )

    async def get(self) -> Chunk:
        event = await self.events.get()
        if isinstance(event, Chunk):
            return event
        try:
            raise event
        finally:
            del event  # its traceback refers to this frame


NUMBERS = itertools.count(1)


def opened(inbox: StreamDemux) -> tuple[int, Arrivals]:
    number = next(NUMBERS)
    arrivals = Arrivals()
    inbox[number] = arrivals
    return number, arrivals
