"""Transfer KV over plain TCP, for hosts without NIXL.

Each fetch has a connection of its own, and the KV must be in CPU memory. KV is not encrypted.

An offer contains the token of its transfer. Without keys, the listener answers only peers that
present the token. With keys, peers must present a proof, which is computed from token and key.

The reader sends `_REQUEST` and the id of the transfer. The listener answers with `_REPLY` and the
regions, which the reader confirms with `_ACK`. If the offer names a checksum method, the magic of
the request is `_CHECKED`, and after each region the listener sends `_CHECKSUM`, which covers all
regions so far. Peers without checksums use the magic `_PLAIN`.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import math
import resource
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from dynamo_trtllm.kv_transfer.checksums import (
    NOTHING,
    Checksums,
    OfferChecksum,
    blocks,
    combined,
    end_jobs,
    wait_for_hashes,
)
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.memory import MemoryRegion, require_cpu, require_sizes, view
from dynamo_trtllm.kv_transfer.transfer_backend import Destination, decode_offer
from dynamo_trtllm.protocol.counted import counted
from dynamo_trtllm.protocol.errors import (
    BadFrame,
    ConfigError,
    EngineFailed,
    TransferFailed,
    TransferTimeout,
)
from dynamo_trtllm.protocol.messages import encode
from dynamo_trtllm.protocol.number_types import Number, Port
from dynamo_trtllm.support.network.addresses import LOOPBACK, host_and_port
from dynamo_trtllm.support.network.connecting import connect
from dynamo_trtllm.support.network.listening import Acceptor

log = logging.getLogger(__name__)

_PLAIN = b"DKV1"
_CHECKED = b"DKV2"
_TOKEN_BYTES = 32  # size of a token and of a proof
_MAX_ID_BYTES = 256
# Magic, token or proof, size of the transfer id that follows, in bytes.
_REQUEST = struct.Struct(f"!4s{_TOKEN_BYTES}sH")
_REPLY = struct.Struct("!4s?Q")  # magic, whether the KV is published, number of bytes that follow
_CHECKSUM = struct.Struct("!Q")
_ACK = b"\x01"
# Most connections that may wait to be accepted. The kernels of further peers retry seconds later.
_BACKLOG = 4096
# The shares of the files that the process may open: at most a half are connections, and at most a
# quarter are connections that have sent no request yet. Otherwise strangers could use up all files.
_CONNECTION_SHARE = 1 / 2
_WITHOUT_REQUEST_SHARE = 1 / 4
_LOG_EVERY_S = 10.0  # shortest time between two log lines about closed connections


class TcpLimits(NamedTuple):
    """The limits of a listener for its peers."""

    max_connections: int = 4096
    max_without_request: int = 1024  # most connections that have sent no request yet
    request_timeout_s: float = 5.0  # a connection without a request is closed after this time


DEFAULT_LIMITS: Final = TcpLimits()


class _TcpOffer(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: Port
    token: bytes
    sizes_bytes: list[Number]
    checksum: str = ""  # name of the checksum method, see `Checksums.method`


@dataclass(slots=True)
class PublishedRegions:
    """A published transfer."""

    regions: tuple[MemoryRegion, ...]
    ready: int  # number of regions that hold their data
    checksum: OfferChecksum | None = None
    # The next change sets this event, and replaces it by a new one.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    readers: set[asyncio.Task[None]] = field(default_factory=set)

    def notify_readers(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class TcpBackend:
    """A KV transfer backend over TCP.

    Args:
        bind_host: address at which the listener listens.
        advertise_host: address to which other hosts connect.
        checksums: compute the checksums of the KV.
        limits: the limits of the listener.
    """

    name = "tcp"

    def __init__(
        self,
        bind_host: str = LOOPBACK,
        advertise_host: str = LOOPBACK,
        checksums: Checksums | None = None,
        limits: TcpLimits = DEFAULT_LIMITS,
    ) -> None:
        self.checksums = checksums or Checksums()
        self._limits = limits
        # Part of `TransferBackend`, but unused here: only threads that transfer GPU memory have to
        # be prepared.
        self.prepare_thread: Callable[[], None] = lambda: None
        self.guard = TransferGuard()
        # The token of a transfer is derived from this secret and the id of the transfer. So the
        # listener knows the tokens of ended transfers, too.
        self._token_secret = secrets.token_bytes(_TOKEN_BYTES)
        self._published: dict[str, PublishedRegions] = {}
        self._bind_host = bind_host
        self._advertise_host = advertise_host
        # The tasks of connections that have sent no request yet, the oldest first.
        self._without_request: dict[asyncio.Task[None], None] = {}
        self._num_closed = 0  # number of connections closed since the last log line about them
        self._logged_at = -math.inf
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None

    async def start(self, on_fetched: Callable[[str], None]) -> None:
        """Listen for peers, see `TransferBackend.start`.

        Raises:
            ConfigError: the backend can't listen at `bind_host`.
        """
        self._on_fetched = on_fetched
        host = self._bind_host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        accepts_ipv4_too = host == "::" and socket.has_dualstack_ipv6()
        try:
            self._listener = socket.create_server(
                (host, 0), family=family, backlog=_BACKLOG, dualstack_ipv6=accepts_ipv4_too
            )
        except OSError as exc:
            raise ConfigError(
                f"KV transfer over tcp can't listen at {host} ({exc.strerror}); set"
                " --kv-transfer-bind-host to an address of this host, or to 0.0.0.0",
                field="kv_transfer_bind_host",
            ) from exc
        self._acceptor = Acceptor(self._listener, self._serve, self._drop_half)
        port = self._listener.getsockname()[1]
        log.info(
            "KV transfer over tcp: listening on port %d at %s, advertised as %s",
            port,
            host,
            self._advertise_host,
        )

    @property
    def address(self) -> str:
        """See `TransferBackend.address`."""
        if self._listener is None:
            return ""
        return host_and_port(self._advertise_host, self._listener.getsockname()[1])

    def address_in(self, offer: bytes, transfer_id: str) -> str:
        """See `TransferBackend.address_in`."""
        facts = decode_offer(_TcpOffer, offer, transfer_id, self.name)
        return host_and_port(facts.host, facts.port)

    async def register(self, region: MemoryRegion) -> None:
        require_cpu([region], self.name)  # host memory needs no registration

    # --- prefill worker ---------------------------------------------------------------------------

    async def publish(
        self, transfer_id: str, regions: Sequence[MemoryRegion], *, ready: int | None = None
    ) -> bytes:
        require_cpu(regions, self.name)
        if self._listener is None:
            raise TransferFailed(
                f"transfer backend {self.name} is not running; start it before publishing KV"
            )
        if transfer_id in self._published:
            raise TransferFailed(
                f"KV transfer {transfer_id} is already published; unpublish it first"
            )
        if ready is None:
            ready = len(regions)
        entry = PublishedRegions(tuple(regions), ready)
        method = self.checksums.method(regions)
        if method:
            entry.checksum = OfferChecksum(self.checksums, entry.regions)
            entry.checksum.mark_ready(entry.ready)
        self._published[transfer_id] = entry
        offer = _TcpOffer(
            host=self._advertise_host,
            port=self._listener.getsockname()[1],
            token=self._token(transfer_id),
            sizes_bytes=[region.num_bytes for region in regions],
            checksum=method,
        )
        return encode(offer)

    def _token(self, transfer_id: str) -> bytes:
        return hmac.digest(self._token_secret, transfer_id.encode(), "sha256")

    def _is_reader(self, transfer_id: str, presented: bytes) -> bool:
        """Return whether a peer presents the token of a transfer, or with keys the proof."""
        return self.guard.is_reader_proof(presented, transfer_id, self._token(transfer_id))

    def mark_ready(self, transfer_id: str, ready: int) -> None:
        entry = self._published.get(transfer_id)
        if entry is None:
            return
        entry.ready = ready
        if entry.checksum is not None:
            entry.checksum.mark_ready(ready)
        entry.notify_readers()

    async def unpublish(self, transfer_id: str) -> None:
        entry = self._published.pop(transfer_id, None)
        if entry is None:
            return
        entry.notify_readers()
        try:
            for reader in entry.readers:
                reader.cancel()
            await asyncio.gather(*entry.readers, return_exceptions=True)
        finally:
            if entry.checksum is not None:
                await entry.checksum.stop()

    def check(self) -> None:
        """See `TransferBackend.check`."""
        if self._acceptor is not None and self._acceptor.broken is not None:
            raise EngineFailed(
                f"KV transfer over tcp accepts no connections ({self._acceptor.broken}); restart"
                " the worker"
            )

    async def _serve(self, connection: socket.socket) -> None:
        """Answer one connection. An invalid request ends only its own connection."""
        with connection:
            task = asyncio.current_task()
            assert task is not None
            if not self._has_space_for_connection():
                return
            self._without_request[task] = None
            try:
                async with asyncio.timeout(self._limits.request_timeout_s):
                    request = await _receive_bytes(connection, _REQUEST.size)
                    magic, presented, id_bytes = _REQUEST.unpack(request)
                    if magic not in (_PLAIN, _CHECKED) or id_bytes > _MAX_ID_BYTES:
                        raise BadFrame("not a KV transfer request")
                    encoded_id = await _receive_bytes(connection, id_bytes)
                    transfer_id = encoded_id.decode(errors="replace")
                # A peer without the parameters of the transfer gets no answer.
                if not self._is_reader(transfer_id, presented):
                    raise BadFrame(f"a peer without the parameters of KV transfer {transfer_id!r}")
                self._without_request.pop(task, None)
                entry = self._published.get(transfer_id)
                if entry is None:
                    refusal = _REPLY.pack(magic, False, 0)
                    await asyncio.get_running_loop().sock_sendall(connection, refusal)
                    return
                # `unpublish` cancels this task before the memory is used for other KV.
                entry.readers.add(task)
                try:
                    await self._send(connection, magic, entry)
                finally:
                    entry.readers.discard(task)
                self._on_fetched(transfer_id)
            except (OSError, TimeoutError, EOFError, BadFrame, TransferFailed) as exc:
                log.debug("KV transfer over tcp: a connection ended early: %r", exc)
            finally:
                self._without_request.pop(task, None)

    def _has_space_for_connection(self) -> bool:
        """Return whether a new connection may stay.

        If there are too many connections, close the oldest one without a request to make space.
        """
        assert self._acceptor is not None
        max_connections = self._limits.max_connections
        max_without_request = self._limits.max_without_request
        max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if max_files != resource.RLIM_INFINITY:
            max_connections = min(max_connections, int(max_files * _CONNECTION_SHARE))
            max_without_request = min(max_without_request, int(max_files * _WITHOUT_REQUEST_SHARE))
        # Both numbers include the new connection, which is not in `_without_request` yet.
        num_connections = self._acceptor.num_connections
        num_without_request = len(self._without_request) + 1
        has_space = (
            num_connections <= max_connections and num_without_request <= max_without_request
        )
        if has_space or self._drop(1):
            return True
        # All other connections have valid requests. So the new connection is closed, and its peer
        # has to retry later.
        self._note_closed(1)
        return False

    def _drop_half(self) -> bool:
        """Close half of the connections without a request. Return False if there is none.

        The acceptor calls this if the process has no file descriptor for a new connection.
        """
        return self._drop((len(self._without_request) + 1) // 2)

    def _drop(self, count: int) -> bool:
        """Close the oldest connections without a request. Return False if there is none."""
        oldest = list(itertools.islice(self._without_request, count))
        for task in oldest:
            del self._without_request[task]
            task.cancel()
        if oldest:
            self._note_closed(len(oldest))
        return bool(oldest)

    def _note_closed(self, count: int) -> None:
        self._num_closed += count
        now = time.monotonic()
        if now >= self._logged_at + _LOG_EVERY_S:
            log.warning(
                "KV transfer over tcp: closed %s, too many are open; check what connects",
                counted(self._num_closed, "connection"),
            )
            self._num_closed = 0
            self._logged_at = now

    async def _send(self, connection: socket.socket, magic: bytes, entry: PublishedRegions) -> None:
        loop = asyncio.get_running_loop()
        total_bytes = sum(region.num_bytes for region in entry.regions)
        checksum = NOTHING  # the checksum of the regions that were sent
        await loop.sock_sendall(connection, _REPLY.pack(magic, True, total_bytes))
        for index, region in enumerate(entry.regions):
            while entry.ready <= index:
                await entry.changed.wait()
            await loop.sock_sendall(connection, view(region))
            if magic == _CHECKED and entry.checksum is not None:
                checksum = combined(checksum, await entry.checksum.hashes(index))
                await loop.sock_sendall(connection, _CHECKSUM.pack(checksum))
        await _receive_bytes(connection, len(_ACK))

    # --- decode worker ----------------------------------------------------------------------------

    async def read(
        self, transfer_id: str, offer: bytes, to: Destination, *, timeout_s: float
    ) -> None:
        facts = decode_offer(_TcpOffer, offer, transfer_id, self.name)
        require_cpu(to.regions, self.name)
        require_sizes(transfer_id, facts.sizes_bytes, to.regions)
        is_checked = self.checksums.is_checked(transfer_id, facts.checksum, to.regions)
        where = f"KV transfer {transfer_id}: prefill worker at {facts.host}:{facts.port}"
        try:
            async with asyncio.timeout(timeout_s):
                await self._read(transfer_id, facts, to, is_checked=is_checked)
        except TimeoutError as exc:
            raise TransferTimeout(f"{where} did not send all KV within {timeout_s:g} s") from exc
        except (OSError, EOFError, struct.error) as exc:
            raise TransferFailed(f"{where} closed the connection: {exc}") from exc

    async def _read(
        self, transfer_id: str, facts: _TcpOffer, to: Destination, *, is_checked: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        our_magic = _CHECKED if is_checked else _PLAIN
        family = socket.AF_INET6 if ":" in facts.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await connect(connection, facts.host, facts.port)
            except OSError as exc:
                raise TransferFailed(
                    f"KV transfer {transfer_id}: can't connect to the prefill worker at"
                    f" {facts.host}:{facts.port}: {exc}"
                ) from exc
            encoded_id = transfer_id.encode()
            presented = self.guard.reader_proof(transfer_id, facts.token)
            request = _REQUEST.pack(our_magic, presented, len(encoded_id))
            await loop.sock_sendall(connection, request + encoded_id)
            reply = await _receive_bytes(connection, _REPLY.size)
            magic, is_published, total_bytes = _REPLY.unpack(reply)
            if magic != our_magic:
                raise TransferFailed(
                    f"KV transfer {transfer_id}: {facts.host}:{facts.port} does not speak the KV"
                    " transfer protocol"
                )
            if not is_published:
                raise TransferFailed(
                    f"KV transfer {transfer_id} is no longer published by its prefill worker"
                )
            expected = sum(facts.sizes_bytes)
            if total_bytes != expected:
                raise TransferFailed(
                    f"KV transfer {transfer_id}: its prefill worker sends {total_bytes} bytes, but"
                    f" published {expected}"
                )
            checksum = NOTHING
            for index, region in enumerate(to.regions):
                if is_checked:
                    checksum = await self._receive_checked(
                        connection, transfer_id, region, checksum
                    )
                else:
                    await _receive(connection, view(region))
                if to.on_region is not None:
                    to.on_region(index)
            await loop.sock_sendall(connection, _ACK)

    async def _receive_checked(
        self, connection: socket.socket, transfer_id: str, region: MemoryRegion, before: int
    ) -> int:
        """Receive a region and return the checksum of all regions up to this one.

        `before` is the checksum of the regions before. Each block is hashed while the next block
        arrives.

        Raises:
            TransferFailed: the checksum differs from that of the sender.
        """
        jobs = []
        try:
            for block in blocks(region):
                await _receive(connection, view(block))
                jobs.append(self.checksums.submit(block))
            theirs = await _receive_bytes(connection, _CHECKSUM.size)
            checksum = combined(before, await wait_for_hashes(jobs))
        finally:
            # The jobs read the memory of the region, which may be freed after this call.
            await end_jobs(jobs)
        if _CHECKSUM.pack(checksum) != theirs:
            raise self.checksums.mismatch(transfer_id)
        return checksum

    async def aclose(self) -> None:
        listener = self._listener
        self._listener = None
        if listener is not None and self._acceptor is not None:
            await self._acceptor.aclose()
            listener.close()
        # Readers over TCP have ended with the acceptor. In tests, readers in the same process may
        # still wait, see `LoopbackBackend`.
        while self._published:
            _, entry = self._published.popitem()
            entry.notify_readers()
        await asyncio.to_thread(self.checksums.close)


async def _receive_bytes(connection: socket.socket, count: int) -> bytearray:
    """Receive `count` bytes. Raises EOFError like `_receive`."""
    received = bytearray(count)
    await _receive(connection, memoryview(received))
    return received


async def _receive(connection: socket.socket, target: memoryview) -> None:
    """Fill `target` with the next bytes of the peer.

    Raises:
        EOFError: the peer has closed the connection before `target` was full.
    """
    loop = asyncio.get_running_loop()
    num_received = 0
    while num_received < len(target):
        count = await loop.sock_recv_into(connection, target[num_received:])
        if count == 0:
            raise EOFError("the connection was closed")
        num_received += count
