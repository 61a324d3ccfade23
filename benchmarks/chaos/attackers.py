"""Faults caused from outside: slow clients, greedy clients, corrupting workers, invalid messages,
idle connections.
"""

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

from dynamo_trtllm.cluster.discovery import records
from dynamo_trtllm.cluster.discovery.etcd import EtcdDiscovery
from dynamo_trtllm.cluster.discovery.etcd_store import EtcdStore
from dynamo_trtllm.cluster.request_plane.frames import PING, Batch, ClientMessage, Frame, OpenStream
from dynamo_trtllm.cluster.request_plane.nats import NatsTransport
from dynamo_trtllm.cluster.request_plane.subjects import control_subject
from dynamo_trtllm.config.config_base import ConnectionConfig
from dynamo_trtllm.protocol.errors import BadFrame
from dynamo_trtllm.protocol.messages import WIRE_VERSION, Instance, Role, decode, encode
from dynamo_trtllm.worker.startup import live_peers

from ..hostile_requests import CASES, MAX_BODY, Request, repeat_item, repeat_text, send
from ..scrape import fetch
from ..stream import StreamConnection
from . import corrupting_worker
from .context import FaultContext
from .deployment import FRONTEND, Deployment, NotReady
from .load import build_load, run_load

_ANSWERS = {"200", "400", "413", "429"}
_LARGE_BODY = 300_000  # bytes
_NUM_BODIES = 80
_LISTENS = "LISTEN"  # of psutil
_SPARE_BYTES = 576 << 20
_DECODERS = ("decode-1", "decode-2")
_SLOW_STREAMS = 4
_GREEDY_STREAMS = 32
_GREEDY_OSL = 4000  # 125 blocks each, of 1024
_GREEDY_S = 120.0  # longer than the outage
_FULL = 0.8  # share of used blocks at which less than one greedy request fits
# each round drops a frame of the newest stream; a stream that loses four ends with an error
_GARBAGE_EVERY_S = 0.5
_CONNECT_S = 5.0
_IDLE_CLIENTS = 150  # per port
_FREE_FILES = 80  # file descriptors left to the process, fewer than its ports accept connections
_ATTACKER = "127.0.0.2"  # the load comes from 127.0.0.1
_RECONNECT_S = 0.3
_FILL_S = 10.0
_PROBE_EVERY_S = 0.1
_FAILED_PROBES = 3  # in a row: a prober of Kubernetes restarts a worker then
_LEASE_TTL_S = 60.0  # upper bound; records are removed after the fault


async def slow_consumers(context: FaultContext) -> None:
    """Start clients that read the first bytes, pause, and read the rest."""

    class SlowConnection(StreamConnection):
        _paused = False

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
                asyncio.get_running_loop().call_later(context.outage_s, self._resume)

        def _resume(self) -> None:
            if self.is_open and self._transport is not None:
                self._transport.resume_reading()

    wanted = build_load(
        context.deployment,
        osl=context.osl,
        streams=_SLOW_STREAMS,
        timeout_s=context.hung_s,
        requests=_SLOW_STREAMS,
    )
    context.records += await run_load(wanted, SlowConnection)


async def big_bodies(context: FaultContext) -> None:
    """Start clients that send large, expensive bodies one after the other."""
    letters = [repeat_text(letter, _LARGE_BODY) for letter in ("a", "\n", "漢", "a" * 1000 + "😀")]
    lists = [repeat_item("0", _LARGE_BODY // 2), repeat_item("[]", _LARGE_BODY // 3)]
    await _attack(context, [*letters, *lists], clients=3)


async def slow_words(context: FaultContext) -> None:
    """Start clients that send tool descriptions with very long words."""
    await _attack(context, [*CASES["tool-words"](), *CASES["many-tools"]()], clients=3)


async def memory_bound(context: FaultContext) -> None:
    """Send large bodies at once whose total size exceeds the frontend's memory limit."""
    (frontend,) = (process for name, process in context.deployment.processes() if name == FRONTEND)
    soft, hard = frontend.rlimit(resource.RLIMIT_DATA)
    frontend.rlimit(resource.RLIMIT_DATA, (frontend.memory_info().data + _SPARE_BYTES, hard))
    try:
        await _attack(context, [repeat_text(" ", MAX_BODY)], clients=_NUM_BODIES)
    finally:
        frontend.rlimit(resource.RLIMIT_DATA, (soft, hard))


async def _attack(context: FaultContext, requests: Sequence[Request], clients: int) -> None:
    """Let each client send these requests in turn until the outage is over.

    Raise NotReady if a request gets an unexpected status.
    """
    until_s = time.monotonic() + context.outage_s
    statuses: set[str] = set()

    async def attack(offset: int) -> None:
        for request in itertools.cycle([*requests[offset:], *requests[:offset]]):
            async with asyncio.timeout(context.hung_s):
                statuses.add(await send(context.deployment.http_port, request))
            if time.monotonic() > until_s:
                return

    async with asyncio.TaskGroup() as group:
        for client in range(clients):
            group.create_task(attack(client % len(requests)))
    if wrong := statuses - _ANSWERS:
        raise NotReady(f"expensive requests got unexpected results: {', '.join(sorted(wrong))}")


async def full_kv(context: FaultContext) -> None:
    """Start clients that need several times the available KV blocks, and disconnect them after the
    outage.
    """
    deployment = context.deployment
    wanted = build_load(
        deployment,
        osl=_GREEDY_OSL,
        streams=_GREEDY_STREAMS,
        timeout_s=_GREEDY_S,
        requests=_GREEDY_STREAMS,
    )
    greedy = asyncio.create_task(run_load(wanted), name="chaos-greedy")
    try:
        await _wait_full(deployment, context.hung_s)
        await asyncio.sleep(context.outage_s)
    finally:
        greedy.cancel()
        await asyncio.gather(greedy, return_exceptions=True)


async def _wait_full(deployment: Deployment, within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while True:
        readings = [asyncio.to_thread(deployment.kv_share, name) for name in _DECODERS]
        share = max(await asyncio.gather(*readings))
        if share >= _FULL:
            return
        if time.monotonic() > until_s:
            raise NotReady(
                f"only {share:.0%} of the KV blocks were used after {within_s:g} s: raise --hung-s"
            )
        await asyncio.sleep(0.02)


async def dead_transfer(context: FaultContext) -> None:
    """Add a prefill worker whose KV never arrives."""
    async with (
        corrupting_worker.black_hole() as change,
        corrupting_worker.register(context.deployment, change),
    ):
        await asyncio.sleep(context.outage_s)


async def corrupt_kv(context: FaultContext) -> None:
    """Add a prefill worker whose KV arrives with flipped bits.

    Raise NotReady if no worker detects it.
    """
    before = await _decoders_total(context, "kv_checksum_mismatches")
    async with (
        corrupting_worker.bit_flipping_relay() as change,
        corrupting_worker.register(context.deployment, change),
    ):
        await asyncio.sleep(context.outage_s)
    if await _decoders_total(context, "kv_checksum_mismatches") <= before:
        raise NotReady("no worker counted a KV checksum mismatch although bits of KV were flipped")


async def _decoders_total(context: FaultContext, counter: str, label: str = "") -> float:
    """Return the sum of a counter over the decode workers."""
    counts = [
        await asyncio.to_thread(context.deployment.worker_total, name, counter, label)
        for name in _DECODERS
    ]
    return sum(counts)


async def failed_read(context: FaultContext) -> None:
    """Add a prefill worker whose KV can't be read: its port is closed, or the offer was
    withdrawn.
    """
    with corrupting_worker.unreadable_offers() as change:
        async with corrupting_worker.register(context.deployment, change):
            await asyncio.sleep(context.outage_s)


async def non_finite_kv(context: FaultContext) -> None:
    """Add a prefill worker whose KV has a NaN. Raise NotReady if no decode worker detects it."""
    async with corrupting_worker.register_nan_worker(context.deployment):
        await asyncio.sleep(context.outage_s)
    if not await _decoders_total(context, "requests", 'code="non_finite_kv"'):
        raise NotReady("no decode worker counted KV with NaN: raise --seconds")


async def expired_params(context: FaultContext) -> None:
    """Add a prefill worker whose KV transfer parameters have all expired."""
    async with corrupting_worker.register(context.deployment, corrupting_worker.expire_params):
        await asyncio.sleep(context.outage_s)


async def version_skew(context: FaultContext) -> None:
    """Add a worker with the next wire version, whose frames are unreadable, and one with a much
    later version.
    """
    template = await _decode_instance(context)
    number = secrets.randbits(63)
    far = msgspec.structs.replace(
        template,
        id=number,
        subject=records.subject(records.endpoint_of(template), number),
        wire=WIRE_VERSION + 7,
    )
    record = {records.instance_key(records.endpoint_of(far), number): encode(far)}
    async with (
        corrupting_worker.register(
            context.deployment, corrupting_worker.set_unknown_finish_reason, wire=WIRE_VERSION + 1
        ),
        _etcd_records(context, record),
    ):
        await asyncio.sleep(context.outage_s)


async def bad_record(context: FaultContext) -> None:
    """Write invalid records: an unreadable key, an empty vocabulary, and two with the id of a live
    worker.
    """
    template = await _decode_instance(context)
    endpoint = records.endpoint_of(template)
    unknown_id = secrets.randbits(63)
    empty = msgspec.structs.replace(
        template,
        id=unknown_id,
        subject=records.subject(endpoint, unknown_id),
        card=msgspec.structs.replace(template.card, vocab_size=0),
    )
    duplicate = msgspec.structs.replace(template, subject="intruder.generate-1")
    invalid = {
        # not UTF-8
        records.namespace_prefix(context.deployment.namespace) + "\udcff\udcfe": b"no record",
        records.instance_key(endpoint, unknown_id): encode(empty),
        records.instance_key(endpoint, unknown_id ^ 1): encode(duplicate),
        records.instance_key(endpoint._replace(endpoint="other"), template.id): encode(duplicate),
    }
    async with _etcd_records(context, invalid):
        await asyncio.sleep(context.outage_s)


async def _decode_instance(context: FaultContext) -> Instance:
    """Return the instance of a decode worker."""
    deployment = context.deployment
    discovery = EtcdDiscovery(ConnectionConfig(etcd_endpoints=deployment.servers["etcd"].address))
    try:
        instances = await live_peers(
            discovery, deployment.namespace, model=deployment.options.model, role=Role.PREFILL
        )  # live_peers returns workers of the other role
    finally:
        await discovery.aclose()
    return instances[0]


@asynccontextmanager
async def _etcd_records(context: FaultContext, records: Mapping[str, bytes]) -> AsyncIterator[None]:
    """Write the records to etcd for the duration of the context.

    Raise NotReady if /health does not list all of them as rejected.
    """
    store = EtcdStore(ConnectionConfig(etcd_endpoints=context.deployment.servers["etcd"].address))
    lease = await store.grant(_LEASE_TTL_S)
    try:
        for key, record in records.items():
            await store.put(key, record, lease)
        yield
        health = orjson.loads(await asyncio.to_thread(fetch, f"{context.deployment.url}/health"))
        listed = len(health["rejected_records"])
        if listed != len(records):
            raise NotReady(f"/health lists {listed} rejected records, expected {len(records)}")
    finally:
        await store.revoke(lease)
        await store.aclose()


async def file_descriptors(victim: str, context: FaultContext) -> None:
    """Open idle connections to the ports of a process until it has no file descriptors left.

    Raise NotReady if the process does not answer /live, or if it never ran out of file descriptors.
    """
    process = context.deployment.process(victim)
    listening = [
        connection.laddr
        for connection in process.net_connections()
        if connection.status == _LISTENS
    ]
    before = process.rlimit(resource.RLIMIT_NOFILE)
    limit = process.num_fds() + _FREE_FILES
    process.rlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    clients = [
        asyncio.create_task(_idle_client(*address), name="chaos-idle-client")
        for address in listening
        for _ in range(_IDLE_CLIENTS)
    ]
    try:
        most = await _probe(context, victim, limit - 8)
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, before)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    if most < limit - 8:
        raise NotReady(f"{victim} had at most {most} of {limit} files open")


async def _idle_client(host: str, port: int) -> None:
    """Hold a connection and reconnect whenever it is closed, until cancelled."""
    while True:
        with suppress(OSError):
            local_address = None if ":" in host else (_ATTACKER, 0)
            reader, writer = await asyncio.open_connection(host, port, local_addr=local_address)
            try:
                await reader.read()
            finally:
                writer.transport.abort()
        await asyncio.sleep(_RECONNECT_S)


async def _probe(context: FaultContext, victim: str, enough: int) -> int:
    """Poll /live during the outage, longer on a busy machine.

    Return the most files that the process had open.
    """
    deployment = context.deployment
    process = deployment.process(victim)
    url = f"{deployment.url if victim == FRONTEND else deployment.health_url(victim)}/live"
    most = 0
    failures = 0
    until_s = time.monotonic() + context.outage_s
    while time.monotonic() < until_s or (most < enough and time.monotonic() < until_s + _FILL_S):
        try:
            await asyncio.to_thread(fetch, url)
            failures = 0
        # on a busy machine, a newer connection may replace this one before its request is read
        except OSError as exc:
            failures += 1
            if failures == _FAILED_PROBES:
                raise NotReady(
                    f"{victim} did not answer /live while idle clients filled its ports: {exc}"
                ) from exc
        most = max(most, process.num_fds())
        await asyncio.sleep(_PROBE_EVERY_S)
    return most


async def garbage(context: FaultContext) -> None:
    """Send random bytes and frames with a wrong number to workers and the frontend."""
    deployment = context.deployment
    transport = NatsTransport(deployment.servers["nats"].address)
    await transport.connect(_CONNECT_S)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transport.aclose)
        health = orjson.loads(await asyncio.to_thread(fetch, f"{deployment.url}/health"))
        subjects = [instance["transport"]["nats_tcp"] for instance in health["instances"]]
        streams: list[OpenStream] = []

        def on_message(data: bytes, _: str) -> None:
            stream = _opened_stream(data)
            if stream is not None:
                streams.append(stream)

        for subject in subjects:
            stack.push_async_callback(await transport.subscribe(subject, on_message))
        hits = 0
        for _ in range(max(1, int(context.outage_s / _GARBAGE_EVERY_S))):
            await asyncio.sleep(min(context.outage_s, _GARBAGE_EVERY_S))
            hits += _send_garbage(transport, subjects, streams)
        if not hits:
            raise NotReady("no stream was opened to which garbage could be sent: raise --seconds")


def _opened_stream(data: bytes) -> OpenStream | None:
    if data == PING:
        return None
    try:
        body = decode(data, ClientMessage).body
    except BadFrame:  # garbage that this fault sent
        return None
    return body if isinstance(body, OpenStream) else None


def _send_garbage(transport: NatsTransport, subjects: list[str], streams: list[OpenStream]) -> bool:
    """Send garbage to all workers, and to the frontend if a stream is open.

    Return whether one was.
    """
    for subject in subjects:
        for target in (subject, control_subject(subject)):
            transport.publish(target, secrets.token_bytes(64))
            transport.publish(target, encode({"not": "an envelope"}))
    if not streams:
        return False
    last = streams[-1]
    transport.publish(last.inbox, encode(Batch([Frame(last.stream, 9999)])))
    transport.publish(last.inbox, secrets.token_bytes(64))
    streams.clear()
    return True
