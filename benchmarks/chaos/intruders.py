"""Those who harm a deployment from outside: slow clients, greedy clients, spoiled tickets, garbage on the subjects."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack

import orjson

from benchmarks.chaos import rogue
from benchmarks.chaos.deployment import Deployment, NotServing
from benchmarks.chaos.load import load, run
from benchmarks.chaos.scene import Scene
from benchmarks.chaos.scrape import fetch
from benchmarks.stream import StreamConnection
from dynamo_trtllm.codec import decode, encode
from dynamo_trtllm.errors import BadFrame
from dynamo_trtllm.plane.nats import NatsLink
from dynamo_trtllm.plane.serving import control_subject
from dynamo_trtllm.plane.stream import PING, Batch, Envelope, Frame, Open

_DECODERS = ("decode-1", "decode-2")
_SLOW_STREAMS = 4
_GREEDY_STREAMS = 32
_GREEDY_OSL = 4000  # 125 blocks each, of 1024
_GREEDY_S = 120.0  # more than they are let stay
_FULL = 0.8  # of the blocks: less than one greedy request is free then
_GARBAGE_EVERY_S = 1.0  # each message to the frontend costs every running stream one of its three migrations
_CONNECT_S = 5.0


async def slow_consumers(scene: Scene) -> None:
    """Clients that read the first bytes, then nothing for a while, then the rest."""

    class Slow(StreamConnection):
        _paused = False

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
                asyncio.get_running_loop().call_later(scene.outage_s, self._read_on)

        def _read_on(self) -> None:
            if self.is_open and self._transport is not None:
                self._transport.resume_reading()

    wanted = load(
        scene.deployment, osl=scene.osl, streams=_SLOW_STREAMS, timeout_s=scene.hung_s, requests=_SLOW_STREAMS
    )
    scene.records += await run(wanted, Slow)


async def full_kv(scene: Scene) -> None:
    """Clients that ask for several times the KV there is, and leave when it has been full for a while."""
    deployment = scene.deployment
    wanted = load(deployment, osl=_GREEDY_OSL, streams=_GREEDY_STREAMS, timeout_s=_GREEDY_S, requests=_GREEDY_STREAMS)
    greedy = asyncio.create_task(run(wanted), name="chaos-greedy")
    try:
        await _filled(deployment, scene.hung_s)
        await asyncio.sleep(scene.outage_s)
    finally:
        greedy.cancel()
        await asyncio.gather(greedy, return_exceptions=True)


async def _filled(deployment: Deployment, within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while (share := max(await asyncio.gather(*(asyncio.to_thread(deployment.kv_share, d) for d in _DECODERS)))) < _FULL:
        if time.monotonic() > until_s:
            raise NotServing(f"the KV was filled to {share:.0%} only within {within_s:g} s: give it more --hung-s")
        await asyncio.sleep(0.02)


async def dead_transfer(scene: Scene) -> None:
    """A prefill worker more, whose KV never arrives."""
    async with rogue.black_hole() as spoil, rogue.registered(scene.deployment, spoil):
        await asyncio.sleep(scene.outage_s)


async def late_ticket(scene: Scene) -> None:
    """A prefill worker more, all of whose tickets have expired."""
    async with rogue.registered(scene.deployment, rogue.late):
        await asyncio.sleep(scene.outage_s)


async def garbage(scene: Scene) -> None:
    """Random bytes and well-formed frames with the wrong number, to workers and to the frontend."""
    deployment = scene.deployment
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
        for _ in range(max(1, int(scene.outage_s / _GARBAGE_EVERY_S))):
            await asyncio.sleep(min(scene.outage_s, _GARBAGE_EVERY_S))
            hits += _throw(link, subjects, openings)
        if not hits:
            raise NotServing("no stream was overheard that garbage could be sent to: give it more --seconds")


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
