"""KV over NIXL's UCX back end: the decode side reads the prefill side's memory, which does nothing meanwhile.

The only module that knows NIXL. A one-sided read can't be refused by its target (over shared memory it even succeeds
after deregistration), so every offer has a guard: 16 random bytes that are wiped on withdrawal and that the reader
compares after the data. NIXL can only be polled: that happens on threads of this module, never on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_trtllm import codec
from dynamo_trtllm.config.environ import export
from dynamo_trtllm.errors import BadFrame, ConfigError, HandoffTimeout, TransferFailed
from dynamo_trtllm.handoff.base import Piece
from dynamo_trtllm.handoff.memory import address_of, require_sizes

_log = logging.getLogger(__name__)

_GUARD_BYTES = 16
_GUARDS = 4096  # offers and fetches at once
_FETCH_THREADS = 8
_PEER_LOADS = 1024  # NIXL keeps what it learned of a peer's memory until the peer is removed as a whole
_NOTICE_WAIT_S = (0.0002, 0.005)  # shortest and longest pause between two looks for notifications
_POLL_WAIT_S = (0.00002, 0.001)
_VARIABLES = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "FATAL"}


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    agent: str
    connection: bytes  # how to reach the agent, and its guard page; the same in all its offers
    memory: bytes  # what a reader must know about this offer's registration; empty when there are no bytes
    descriptors: bytes
    guard: bytes  # descriptor of the guard
    nonce: bytes  # what the guard holds while the offer stands
    sizes_bytes: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    registered: Any | None
    slot: int


@dataclass(slots=True)
class _Peer:
    name: str
    loads: int = 0
    fetches: int = 0
    broken: bool = False


class NixlCarrier:
    """A Carrier over NIXL. CPU and CUDA memory; the pieces of one side of one transfer are all of the same kind."""

    name = "nixl/ucx"

    def __init__(self) -> None:
        for variable, value in _VARIABLES.items():
            export(variable, value, wanted_by="handoff/nixl")
        try:
            from nixl import _api as api
            from nixl import _bindings as bindings
        except ImportError as exc:
            raise ConfigError(f"carrier nixl: {exc}; install it with: pip install 'dynamo_trtllm[nixl]'") from exc
        self._api: Any = api
        self._errors = _error_classes(bindings)
        self._agent_name = f"dynamo-{uuid.uuid4().hex}"
        self._agent: Any = None
        self._offers: dict[str, _Held] = {}
        self._peers: dict[str, _Peer] = {}
        self._peers_lock = threading.Lock()  # peers are met and dropped by several fetch threads
        self._guards = mmap.mmap(-1, _GUARDS * _GUARD_BYTES)
        self._free_slots = list(range(_GUARDS))
        self._wake = threading.Condition()
        self._closing = False

    async def start(self, on_fetched: Callable[[str], None]) -> None:
        """Raises ConfigError when NIXL can't start its UCX back end."""
        self._loop = asyncio.get_running_loop()
        self._on_fetched = on_fetched
        self._fetching = ThreadPoolExecutor(_FETCH_THREADS, "nixl-fetch")
        self._registering = ThreadPoolExecutor(1, "nixl-register")
        await self._loop.run_in_executor(self._registering, self._open)
        self._listener = threading.Thread(target=self._listen, name="nixl-notices", daemon=True)
        self._listener.start()

    def _open(self) -> None:
        # Its progress thread spins on a whole core for as long as the agent lives (seen with 1.5.1): `_listen` and the
        # readers' polling make progress instead.
        sync = self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        settings = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
        try:
            self._agent = self._api.nixl_agent(self._agent_name, settings)
            self._guards_address = address_of(self._guards)
            page = self._agent.register_memory([(self._guards_address, len(self._guards), 0, "")], "DRAM")
            self._connection: bytes = self._agent.get_partial_agent_metadata(page, True, ["UCX"])
        except self._errors as exc:
            raise ConfigError(f"carrier nixl can't start its UCX back end: {exc!r}; choose carrier tcp") from exc

    # --- the holder's side ---------------------------------------------------------------------------------

    async def offer(self, ticket_id: str, pieces: Sequence[Piece]) -> bytes:
        if self._agent is None or self._closing:
            raise TransferFailed("carrier nixl is not running; start it before it offers")
        if ticket_id in self._offers:
            raise TransferFailed(f"ticket {ticket_id} is already offered; withdraw it first")
        slot = self._take_slot()
        self._offers[ticket_id] = _Held(registered=None, slot=slot)
        registering = self._registering.submit(self._register, ticket_id, slot, tuple(pieces))
        try:
            offer = await asyncio.shield(asyncio.wrap_future(registering))
        except asyncio.CancelledError:
            self._registering.submit(self._discard, ticket_id)  # after the registration: the executor has one thread
            raise
        with self._wake:
            self._wake.notify()
        return offer

    def _register(self, ticket_id: str, slot: int, pieces: Sequence[Piece]) -> bytes:
        """Thread of registrations: all of an offer, or nothing."""
        try:
            with self._translated("can't register the memory of an offer"):
                return self._describe(ticket_id, slot, pieces)
        except TransferFailed:
            self._discard(ticket_id)
            raise

    def _describe(self, ticket_id: str, slot: int, pieces: Sequence[Piece]) -> bytes:
        nonce = secrets.token_bytes(_GUARD_BYTES)
        memory, descriptors = b"", b""
        live = [piece for piece in pieces if piece.num_bytes]
        if live:
            registered = self._agent.register_memory(*_regions(live))
            self._offers[ticket_id] = _Held(registered=registered, slot=slot)
            memory = self._agent.get_partial_agent_metadata(registered, False, ["UCX"])
            descriptors = self._agent.get_serialized_descs(registered.trim())
        guard = self._agent.get_serialized_descs(self._slot_descriptor(slot))
        self._guards[slot * _GUARD_BYTES : (slot + 1) * _GUARD_BYTES] = nonce
        offer = _Offer(
            agent=self._agent_name,
            connection=self._connection,
            memory=memory,
            descriptors=descriptors,
            guard=guard,
            nonce=nonce,
            sizes_bytes=[piece.num_bytes for piece in pieces],
        )
        return codec.encode(offer)

    async def withdraw(self, ticket_id: str) -> None:
        held = self._offers.get(ticket_id)
        if held is None:
            return
        self._wipe(held.slot)  # at once: from here on no read of the offer counts
        await asyncio.shield(asyncio.wrap_future(self._registering.submit(self._discard, ticket_id)))

    def _discard(self, ticket_id: str) -> None:
        """Thread of registrations: ends an offer."""
        held = self._offers.pop(ticket_id, None)
        if held is None:
            return
        self._wipe(held.slot)
        self._free_slots.append(held.slot)
        if held.registered is not None:
            with self._translated("can't deregister memory"):
                self._agent.deregister_memory(held.registered)

    def _listen(self) -> None:
        """Thread: looks for notifications while offers are out, sleeps on the condition otherwise."""
        shortest_s, longest_s = _NOTICE_WAIT_S
        wait_s = shortest_s
        while True:
            with self._wake:
                if self._closing:
                    return
                woken = self._wake.wait(wait_s if self._offers else None)
            try:
                notices = self._agent.get_new_notifs()
            except self._errors:
                _log.warning("carrier nixl: looking for notifications failed", exc_info=True)
                notices = {}
            wait_s = shortest_s if woken or notices else min(2 * wait_s, longest_s)
            for messages in notices.values():
                for message in messages:
                    self._loop.call_soon_threadsafe(self._tell, message.decode(errors="replace"))

    def _tell(self, ticket_id: str) -> None:
        if ticket_id in self._offers:  # a late word about a withdrawn offer is of no use
            self._on_fetched(ticket_id)

    # --- the reader's side ---------------------------------------------------------------------------------

    async def fetch(self, ticket_id: str, offer: bytes, pieces: Sequence[Piece], *, timeout_s: float) -> None:
        """See `Carrier.fetch`. A cancelled fetch returns when its read has ended, at the latest after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        try:
            facts = codec.decode(offer, _Offer)
        except BadFrame as exc:
            raise TransferFailed(f"ticket {ticket_id}: its offer is not one of carrier {self.name}") from exc
        require_sizes(ticket_id, facts.sizes_bytes, pieces)
        if self._agent is None or self._closing:
            raise TransferFailed("carrier nixl is not running; start it before it fetches")
        slot = self._take_slot()
        reading = self._fetching.submit(self._read, ticket_id, facts, tuple(pieces), slot, deadline)
        try:
            await _finished(reading)
        finally:
            self._wipe(slot)
            self._free_slots.append(slot)

    def _read(self, ticket_id: str, facts: _Offer, pieces: Sequence[Piece], slot: int, deadline: float) -> None:
        """Thread: the data, then the guard with the notification."""
        if time.monotonic() >= deadline:
            raise HandoffTimeout(f"ticket {ticket_id}: no thread was free to fetch it in time")
        registered = None
        live = [piece for piece in pieces if piece.num_bytes]
        with self._translated(f"ticket {ticket_id}: reading from its holder failed"), self._met(facts) as peer:
            try:
                if live:
                    registered = self._agent.register_memory(*_regions(live))
                    remote = self._agent.deserialize_descs(facts.descriptors)
                    self._transfer(peer, registered.trim(), remote, b"", deadline)
                guard = self._agent.deserialize_descs(facts.guard)
                self._transfer(peer, self._slot_descriptor(slot), guard, ticket_id.encode(), deadline)
            finally:
                if registered is not None:
                    self._agent.deregister_memory(registered)
        if self._guards[slot * _GUARD_BYTES : (slot + 1) * _GUARD_BYTES] != facts.nonce:
            raise TransferFailed(f"ticket {ticket_id}: its holder no longer offers it")

    @contextlib.contextmanager
    def _met(self, facts: _Offer) -> Iterator[_Peer]:
        """The peer, with the offer's memory made known. One that failed is forgotten: the next fetch reconnects."""
        with self._peers_lock:
            peer = self._peers.get(facts.agent)
            if peer is None:
                self._agent.add_remote_agent(facts.connection)
                peer = self._peers[facts.agent] = _Peer(facts.agent)
            if facts.memory:
                self._agent.add_remote_agent(facts.memory)
            peer.loads += 1
            peer.fetches += 1
        try:
            yield peer
        except self._errors:
            peer.broken = True
            raise
        finally:
            with self._peers_lock:
                peer.fetches -= 1
                if peer.broken or (peer.loads >= _PEER_LOADS and peer.fetches == 0):
                    self._forget(peer)

    def _forget(self, peer: _Peer) -> None:
        """Closes the connection to a peer, which also ends all that still moves over it. Holds the lock."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            with contextlib.suppress(*self._errors):
                self._agent.remove_remote_agent(peer.name)

    def _transfer(self, peer: _Peer, local: Any, remote: Any, notice: bytes, deadline: float) -> None:
        """One READ, to its end. When this returns or raises, NIXL writes to `local` no more."""
        handle = self._agent.initialize_xfer("READ", local, remote, peer.name, notice)
        state = "PROC"
        try:
            state = self._agent.transfer(handle)
            wait_s, longest_s = _POLL_WAIT_S
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, longest_s)
                state = self._agent.check_xfer_state(handle)
        finally:
            if state == "PROC":
                self._abort(peer, handle)
            else:
                self._agent.release_xfer_handle(handle)
        if state == "PROC":
            raise HandoffTimeout(f"holder {peer.name} did not answer in time")
        if state != "DONE":
            peer.broken = True
            raise TransferFailed(f"NIXL ended a read from {peer.name} with state {state}")

    def _abort(self, peer: _Peer, handle: Any) -> None:
        """Ends a read that did not finish: closing the connection is the only abort that UCX guarantees."""
        with self._peers_lock:
            peer.broken = True
            self._forget(peer)
        while True:
            try:
                self._agent.release_xfer_handle(handle)
                return
            except self._errors:
                time.sleep(_POLL_WAIT_S[1])

    # --- both ----------------------------------------------------------------------------------------------

    def _take_slot(self) -> int:
        if not self._free_slots:
            raise TransferFailed(f"carrier nixl has {_GUARDS} offers and fetches open; withdraw some")
        return self._free_slots.pop()

    def _wipe(self, slot: int) -> None:
        self._guards[slot * _GUARD_BYTES : (slot + 1) * _GUARD_BYTES] = bytes(_GUARD_BYTES)

    def _slot_descriptor(self, slot: int) -> Any:
        return self._agent.get_xfer_descs([(self._guards_address + slot * _GUARD_BYTES, _GUARD_BYTES, 0)], "DRAM")

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as exc:
            raise TransferFailed(f"{what}: {exc}") from exc

    async def aclose(self) -> None:
        if self._closing or self._agent is None:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._fetching.shutdown(cancel_futures=True)
        self._registering.shutdown()
        self._listener.join()
        for ticket_id in list(self._offers):
            self._discard(ticket_id)
        with self._peers_lock:
            for peer in list(self._peers.values()):
                self._forget(peer)
        self._agent = None


def _regions(pieces: Sequence[Piece]) -> tuple[list[tuple[int, int, int, str]], str]:
    """NIXL's view of pieces: regions and their kind of memory."""
    kinds = {piece.device.partition(":")[0] for piece in pieces}
    if len(kinds) != 1 or not kinds <= {"cpu", "cuda"}:
        raise TransferFailed(f"carrier nixl moves CPU or CUDA pieces, one kind per transfer, not {sorted(kinds)}")
    regions = [(piece.address, piece.num_bytes, int(piece.device.partition(":")[2] or 0), "") for piece in pieces]
    return regions, "DRAM" if kinds == {"cpu"} else "VRAM"


def _error_classes(bindings: Any) -> tuple[type[Exception], ...]:
    """What NIXL raises; its exceptions have no base class of their own."""
    classes = [found for found in vars(bindings).values() if isinstance(found, type) and issubclass(found, Exception)]
    return (*classes, RuntimeError)


async def _finished(work: Future[None]) -> None:
    """The result of work on a thread; when cancelled, only after it ended: it writes to the caller's memory."""
    future = asyncio.wrap_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as exc:
            cancelled = exc
            work.cancel()  # has an effect only while it waits for a thread
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # seen: its caller no longer cares
        raise cancelled
    future.result()
