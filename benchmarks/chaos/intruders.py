"""Those who harm a deployment from outside: slow clients, greedy clients, spoiled tickets, garbage on the subjects,
idle connections."""

from __future__ import annotations

import asyncio
import itertools
import resource
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec
import orjson
import psutil

from benchmarks.chaos import rogue
from benchmarks.chaos.deployment import FRONTEND, Deployment, NotServing
from benchmarks.chaos.load import load, run
from benchmarks.chaos.scene import Scene
from benchmarks.chaos.scrape import fetch
from benchmarks.hostile import CASES, MAX_BODY, Request, listed, said, send
from benchmarks.stream import StreamConnection
from dynamo_trtllm.codec import decode, encode
from dynamo_trtllm.discovery import keys
from dynamo_trtllm.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.discovery.etcd_store import EtcdStore
from dynamo_trtllm.errors import BadFrame
from dynamo_trtllm.messages import WIRE_VERSION, Instance, Role
from dynamo_trtllm.request_plane.frames import PING, Batch, ClientMessage, Frame, OpenStream
from dynamo_trtllm.request_plane.nats import NatsTransport
from dynamo_trtllm.request_plane.server import control_subject
from dynamo_trtllm.worker.startup import live_peers

_ANSWERS = {"200", "400", "413", "429"}
_LARGE_BODY = 300_000
_BODIES = 80
_SPARE_BYTES = 576 << 20
_DECODERS = ("decode-1", "decode-2")
_SLOW_STREAMS = 4
_GREEDY_STREAMS = 32
_GREEDY_OSL = 4000  # 125 blocks each, of 1024
_GREEDY_S = 120.0  # more than they are let stay
_FULL = 0.8  # of the blocks: less than one greedy request is free then
_GARBAGE_EVERY_S = 0.5  # each time the newest stream loses a frame: one that is hit four times ends with an error
_CONNECT_S = 5.0
_VICTIM = "prefill-1"
_STRANGERS = 150  # at each of its ports
_FREE_FILES = 80  # that it may open beyond those it has open; fewer than its ports would let strangers have
_AGAIN_S = 0.3  # between two connections of a stranger
_FILL_S = 10.0
_PROBE_EVERY_S = 0.1
_LEASE_TTL_S = 60.0  # upper bound; records are removed after the fault


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


async def big_bodies(scene: Scene) -> None:
    """Clients that send large bodies of expensive kinds, as fast as they are answered."""
    letters = [said(letter, _LARGE_BODY) for letter in ("a", "\n", "漢", "a" * 1000 + "😀")]
    lists = [listed("0", _LARGE_BODY // 2), listed("[]", _LARGE_BODY // 3)]
    await _attack(scene, [*letters, *lists], clients=3)


async def slow_words(scene: Scene) -> None:
    """Clients that send tools whose descriptions are long words."""
    await _attack(scene, [*CASES["tool-words"](), *CASES["many-tools"]()], clients=3)


async def memory_bound(scene: Scene) -> None:
    """Large bodies at once, of more bytes together than the frontend may have."""
    (frontend,) = (process for name, process in scene.deployment.processes() if name == FRONTEND)
    soft, hard = frontend.rlimit(psutil.RLIMIT_DATA)
    frontend.rlimit(psutil.RLIMIT_DATA, (frontend.memory_info().data + _SPARE_BYTES, hard))
    try:
        await _attack(scene, [said(" ", MAX_BODY)], clients=_BODIES)
    finally:
        frontend.rlimit(psutil.RLIMIT_DATA, (soft, hard))


async def _attack(scene: Scene, requests: Sequence[Request], clients: int) -> None:
    """Send these requests, one after the other by each client, until the outage is over.

    Raise NotServing when one of them is not answered as it should be.
    """
    until_s = time.monotonic() + scene.outage_s
    statuses: set[str] = set()

    async def attack(offset: int) -> None:
        for request in itertools.cycle([*requests[offset:], *requests[:offset]]):
            async with asyncio.timeout(scene.hung_s):
                statuses.add(await send(scene.deployment.http_port, request))
            if time.monotonic() > until_s:
                return

    async with asyncio.TaskGroup() as group:
        for client in range(clients):
            group.create_task(attack(client % len(requests)))
    if wrong := statuses - _ANSWERS:
        raise NotServing(f"hostile requests ended with {', '.join(sorted(wrong))}")


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


async def corrupt_kv(scene: Scene) -> None:
    """A prefill worker more, whose KV arrives with flipped bits. Raise NotServing when no worker counts it."""
    before = await _decoders_total(scene, "kv_checksum_mismatches")
    async with rogue.corrupting() as spoil, rogue.registered(scene.deployment, spoil):
        await asyncio.sleep(scene.outage_s)
    if await _decoders_total(scene, "kv_checksum_mismatches") <= before:
        raise NotServing("no worker counts a KV checksum that was wrong, though bits of KV were flipped")


async def _decoders_total(scene: Scene, counter: str, label: str = "") -> float:
    """Return the sum of a counter over the decode workers, so far."""
    counts = [await asyncio.to_thread(scene.deployment.worker_total, name, counter, label) for name in _DECODERS]
    return sum(counts)


async def failed_read(scene: Scene) -> None:
    """A prefill worker more, whose KV can't be read: its port refuses connections, or it offers the KV no longer."""
    with rogue.unreadable() as spoil:
        async with rogue.registered(scene.deployment, spoil):
            await asyncio.sleep(scene.outage_s)


async def non_finite_kv(scene: Scene) -> None:
    """A prefill worker more, whose KV has a NaN. Raise NotServing when no decode worker counts it."""
    async with rogue.poisoned(scene.deployment):
        await asyncio.sleep(scene.outage_s)
    if not await _decoders_total(scene, "requests", 'code="non_finite_kv"'):
        raise NotServing("no decode worker counts KV with NaN: give it more --seconds")


async def late_ticket(scene: Scene) -> None:
    """A prefill worker more, all of whose tickets have expired."""
    async with rogue.registered(scene.deployment, rogue.late):
        await asyncio.sleep(scene.outage_s)


async def version_skew(scene: Scene) -> None:
    """A worker of the next wire version, whose frames this one can't read, and a worker several versions ahead."""
    good = await _decode_instance(scene)
    number = secrets.randbits(63)
    far = msgspec.structs.replace(
        good, id=number, subject=keys.subject(keys.endpoint_of(good), number), wire=WIRE_VERSION + 7
    )
    record = {keys.instance_key(keys.endpoint_of(far), number): encode(far)}
    async with (
        rogue.registered(scene.deployment, rogue.newer, wire=WIRE_VERSION + 1),
        _written(scene, record),
    ):
        await asyncio.sleep(scene.outage_s)


async def bad_record(scene: Scene) -> None:
    """Records that no worker wrote: unreadable keys, impossible sizes, and two that claim to be a living worker."""
    good = await _decode_instance(scene)
    endpoint, stranger = keys.endpoint_of(good), secrets.randbits(63)
    empty = msgspec.structs.replace(
        good,
        id=stranger,
        subject=keys.subject(endpoint, stranger),
        card=msgspec.structs.replace(good.card, vocab_size=0),
    )
    intruder = msgspec.structs.replace(good, subject="intruder.generate-1")
    records = {
        keys.namespace_prefix(scene.deployment.namespace) + "\udcff\udcfe": b"no record",  # bytes that are no UTF-8
        keys.instance_key(endpoint, stranger): encode(empty),
        keys.instance_key(endpoint, stranger ^ 1): encode(intruder),
        keys.instance_key(endpoint._replace(endpoint="other"), good.id): encode(intruder),
    }
    async with _written(scene, records):
        await asyncio.sleep(scene.outage_s)


async def _decode_instance(scene: Scene) -> Instance:
    """Return the record of a decode worker."""
    deployment = scene.deployment
    discovery = EtcdDiscovery(deployment.servers["etcd"].address)
    try:
        found = await live_peers(
            discovery, deployment.namespace, model=deployment.options.model, role=Role.PREFILL
        )  # live_peers returns workers of the other role
    finally:
        await discovery.aclose()
    return found[0]


@asynccontextmanager
async def _written(scene: Scene, records: Mapping[str, bytes]) -> AsyncIterator[None]:
    """Write the records to etcd for the context.

    Raise NotServing when /health does not list as many rejected records.
    """
    store = EtcdStore(scene.deployment.servers["etcd"].address)
    lease = await store.grant(_LEASE_TTL_S)
    try:
        for key, record in records.items():
            await store.put(key, record, lease)
        yield
        health = orjson.loads(await asyncio.to_thread(fetch, f"{scene.deployment.url}/health"))
        shown = len(health["rejected_records"])
        if shown != len(records):
            raise NotServing(f"/health shows {shown} rejected records where {len(records)} were written")
    finally:
        await store.revoke(lease)
        await store.aclose()


async def file_descriptors(scene: Scene) -> None:
    """Strangers that connect to the ports of a worker and ask for nothing, until it has no file descriptors left.

    Raise NotServing when it does not answer /live, and when it was never short of them.
    """
    process = scene.deployment.process(_VICTIM)
    listening = [each.laddr for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
    before = process.rlimit(resource.RLIMIT_NOFILE)
    limit = process.num_fds() + _FREE_FILES
    process.rlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    strangers = [
        asyncio.create_task(_stay(*address), name="chaos-stranger") for address in listening for _ in range(_STRANGERS)
    ]
    try:
        most = await _probe(scene, process, limit - 8)
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, before)
        for task in strangers:
            task.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)
    if most < limit - 8:
        raise NotServing(f"{_VICTIM} had at most {most} of {limit} files open")


async def _stay(host: str, port: int) -> None:
    """One stranger, that comes back whenever it is thrown out. Until cancelled."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await reader.read()
            finally:
                writer.transport.abort()
        await asyncio.sleep(_AGAIN_S)


async def _probe(scene: Scene, process: psutil.Process, enough: int) -> int:
    """Return the most files that the worker had open. Strangers on a busy machine get more time to fill it."""
    url = f"{scene.deployment.health_url(_VICTIM)}/live"
    most, until_s = 0, time.monotonic() + scene.outage_s
    while time.monotonic() < until_s or (most < enough and time.monotonic() < until_s + _FILL_S):
        try:
            await asyncio.to_thread(fetch, url)
        except OSError as exc:
            raise NotServing(f"{_VICTIM} did not answer /live while strangers filled its ports: {exc}") from exc
        most = max(most, process.num_fds())
        await asyncio.sleep(_PROBE_EVERY_S)
    return most


async def garbage(scene: Scene) -> None:
    """Random bytes and well-formed frames with the wrong number, to workers and to the frontend."""
    deployment = scene.deployment
    transport = NatsTransport(deployment.servers["nats"].address)
    await transport.connect(_CONNECT_S)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transport.aclose)
        health = orjson.loads(await asyncio.to_thread(fetch, f"{deployment.url}/health"))
        subjects = [instance["transport"]["nats_tcp"] for instance in health["instances"]]
        openings: list[OpenStream] = []

        def overhear(data: bytes, _: str) -> None:
            opening = _opening(data)
            if opening is not None:
                openings.append(opening)

        for subject in subjects:
            stack.push_async_callback((await transport.subscribe(subject, overhear)).stop)
        hits = 0
        for _ in range(max(1, int(scene.outage_s / _GARBAGE_EVERY_S))):
            await asyncio.sleep(min(scene.outage_s, _GARBAGE_EVERY_S))
            hits += _throw(transport, subjects, openings)
        if not hits:
            raise NotServing("no stream was overheard that garbage could be sent to: give it more --seconds")


def _opening(data: bytes) -> OpenStream | None:
    if data == PING:
        return None
    try:
        body = decode(data, ClientMessage).body
    except BadFrame:  # what we have thrown ourselves
        return None
    return body if isinstance(body, OpenStream) else None


def _throw(transport: NatsTransport, subjects: list[str], openings: list[OpenStream]) -> bool:
    """Whether the frontend got its share."""
    for subject in subjects:
        for target in (subject, control_subject(subject)):
            transport.publish(target, secrets.token_bytes(64))
            transport.publish(target, encode({"not": "an envelope"}))
    if not openings:
        return False
    last = openings[-1]
    transport.publish(last.inbox, encode(Batch([Frame(last.stream, 9999)])))
    transport.publish(last.inbox, secrets.token_bytes(64))
    openings.clear()
    return True
