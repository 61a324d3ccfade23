"""What a frontend process and its parent tell each other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo_trtllm.frontend.process.control_pipe import ControlPipe
from dynamo_trtllm.protocol.errors import DeadlineExceeded, Disconnected

NUMBERS = b'requests_total{model="m"} 3.0\n'


class End:
    """One end of a control pipe, and the events that happened there."""

    def __init__(self) -> None:
        self.numbers: bytes = b""
        self.is_served = asyncio.Event()
        self.is_answering = asyncio.Event()
        self.is_answering.set()

    async def snapshot(self) -> bytes:
        await self.is_answering.wait()
        return self.numbers


@asynccontextmanager
async def pair(
    one: End, other: End
) -> AsyncIterator[tuple[ControlPipe, ControlPipe, list[asyncio.Task[None]]]]:
    sockets = socket.socketpair()
    channels = [
        ControlPipe(*await asyncio.open_unix_connection(sock=sock), end.snapshot, end.is_served.set)
        for sock, end in zip(sockets, (one, other), strict=True)
    ]
    running = [asyncio.create_task(channel.run()) for channel in channels]
    try:
        yield channels[0], channels[1], running
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_ask_returns_numbers_in_both_directions() -> None:
    one = End()
    other = End()
    other.numbers = NUMBERS
    async with asyncio.timeout(10), pair(one, other) as (here, there, _):
        assert await here.request_snapshot(5) == NUMBERS
        assert await there.request_snapshot(5) == b""


async def test_ask_from_both_ends_answers_both() -> None:
    """A scrape at one process: it asks its parent, who asks it."""
    one = End()
    other = End()
    async with asyncio.timeout(10), pair(one, other) as (here, there, _):

        async def ask_back() -> bytes:
            return await there.request_snapshot(5)

        one.numbers = NUMBERS
        there.snapshot = ask_back
        assert await here.request_snapshot(5) == NUMBERS


async def test_say_served_then_the_other_end_knows() -> None:
    one = End()
    other = End()
    async with asyncio.timeout(10), pair(one, other) as (here, there, _):
        assert not there.is_other_ready
        here.send_ready()
        await other.is_served.wait()
        assert there.is_other_ready
        assert not one.is_served.is_set()


async def test_ask_when_the_other_end_is_silent_then_deadline_exceeded() -> None:
    one = End()
    other = End()
    other.is_answering.clear()
    async with asyncio.timeout(10), pair(one, other) as (here, _, _):
        with pytest.raises(DeadlineExceeded):
            await here.request_snapshot(0.02)
        other.is_answering.set()
        # the answer that came too late is not taken for this one
        assert await here.request_snapshot(5) == b""


async def test_ask_of_gone_end_is_disconnected() -> None:
    one = End()
    other = End()
    other.is_answering.clear()
    async with asyncio.timeout(10), pair(one, other) as (here, _, running):
        asking = asyncio.create_task(here.request_snapshot(5))
        await asyncio.sleep(0)
        running[1].cancel()
        with pytest.raises(Disconnected):
            await asking
        await running[0]
        with pytest.raises(Disconnected):
            await here.request_snapshot(5)


async def test_announced_stop_is_known_at_the_other_end() -> None:
    one = End()
    other = End()
    async with asyncio.timeout(10), pair(one, other) as (here, there, _):
        here.announce_stop()
        here.send_ready()
        await other.is_served.wait()
        assert there.is_stop_announced
        assert there.is_other_ready
        assert not here.is_stop_announced
