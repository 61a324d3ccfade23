"""Those who harm a deployment from outside: slow clients, greedy clients, spoiled tickets, garbage on the subjects.

Each acts for some seconds and returns the records of the further requests that are to be judged.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack

import orjson

from benchmarks.chaos import rogue
from benchmarks.chaos.deployment import Deployment, NotServing
from benchmarks.chaos.load import load, run
from benchmarks.chaos.scrape import fetch
from benchmarks.stream import Record, StreamConnection
from dynamo_trtllm.codec import decode, encode
from dynamo_trtllm.errors import BadFrame
from dynamo_trtllm.plane.nats import NatsLink
from dynamo_trtllm.plane.serving import control_subject
from dynamo_trtllm.plane.stream import PING, Batch, Envelope, Frame, Open

_SLOW_STREAMS = 4
_GREEDY_STREAMS = 32
_GREEDY_OSL = 4000  # 125 blocks each, of 1024
_FULL = 0.8  # of the blocks: less than one greedy request is free then
_GARBAGE_EVERY_S = 1.0  # each message to the frontend costs every running stream one of its three migrations
_CONNECT_S = 5.0


async def slow_consumers(deployment: Deployment, *, seconds: float, osl: int, hung_s: float) -> list[Record]:
    """Clients that read the first bytes, then nothing for a while, then the rest."""

    class Slow(StreamConnection):
        _paused = False

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
                asyncio.get_running_loop().call_later(seconds, self._read_on)

        def _read_on(self) -> None:
            if self.is_open and self._transport is not None:
                self._transport.resume_reading()

    wanted = load(deployment, osl=osl, streams=_SLOW_STREAMS, timeout_s=hung_s, requests=_SLOW_STREAMS)
    return await run(wanted, Slow)


async def full_kv(deployment: Deployment, *, seconds: float, osl: int, hung_s: float) -> list[Record]:
    """Clients that ask for several times the KV there is, and leave."""
    del osl, hung_s
    await run(load(deployment, osl=_GREEDY_OSL, streams=_GREEDY_STREAMS, timeout_s=seconds, requests=_GREEDY_STREAMS))
    return []


async def dead_transfer(deployment: Deployment, *, seconds: float, osl: int, hung_s: float) -> list[Record]:
    """A prefill worker more, whose KV never arrives."""
    del osl, hung_s
    async with rogue.black_hole() as spoil, rogue.registered(deployment, spoil):
        await asyncio.sleep(seconds)
    return []


async def late_ticket(deployment: Deployment, *, seconds: float, osl: int, hung_s: float) -> list[Record]:
    """A prefill worker more, all of whose tickets have expired."""
    del osl, hung_s
    async with rogue.registered(deployment, rogue.late):
        await asyncio.sleep(seconds)
    return []


async def garbage(deployment: Deployment, *, seconds: float, osl: int, hung_s: float) -> list[Record]:
    """Random bytes and well-formed frames with the wrong number, to workers and to the frontend."""
    del osl, hung_s
    link = NatsLink(deployment.servers["nats"].address)
    await link.connect(_CONNECT_S)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(link.aclose)
        health = orjson.loads(await asyncio.to_thread(fetch, f"{deployment.url}/health"))
        subjects = [instance["transport"]["nats_tcp"] for instance in health["instances"]]
        openings: list[Open] = []

        def overhear(data: bytes, _: str) -> None:
            opening = _opening(data)
            if opening is not None:
                openings.append(opening)

        for subject in subjects:
            stack.push_async_callback((await link.listen(subject, overhear)).stop)
        hits = 0
        for _ in range(max(1, int(seconds / _GARBAGE_EVERY_S))):
            await asyncio.sleep(min(seconds, _GARBAGE_EVERY_S))
            hits += _throw(link, subjects, openings)
        if not hits:
            raise NotServing("no stream was overheard that garbage could be sent to: give it more --seconds")
    return []


def _opening(data: bytes) -> Open | None:
    if data == PING:
        return None
    try:
        body = decode(data, Envelope).body
    except BadFrame:  # what we have thrown ourselves
        return None
    return body if isinstance(body, Open) else None


def _throw(link: NatsLink, subjects: list[str], openings: list[Open]) -> bool:
    """Whether the frontend got its share."""
    for subject in subjects:
        for target in (subject, control_subject(subject)):
            link.post(target, secrets.token_bytes(64))
            link.post(target, encode({"not": "an envelope"}))
    if not openings:
        return False
    last = openings[-1]
    link.post(last.inbox, encode(Batch([Frame(last.stream, 9999)])))
    link.post(last.inbox, secrets.token_bytes(64))
    openings.clear()
    return True
