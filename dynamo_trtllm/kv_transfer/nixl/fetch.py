"""One fetch, step by step: pieces as they become ready, a few in flight, then the guard, and a word to the holder.

Threads hash checked pieces while others arrive. The checksum is in the guard, which a reader always reads last.
NIXL can only be polled: each fetch lets others have their turn while it waits, see `moving`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dynamo_trtllm.errors import TransferFailed, TransferTimeout
from dynamo_trtllm.kv_transfer.base import MemoryRegion, OnRegion
from dynamo_trtllm.kv_transfer.checksums import NOTHING, Checksums, combined, hashes_of
from dynamo_trtllm.kv_transfer.nixl.bindings import (
    Descriptor,
    NixlBindings,
    NixlOffer,
    descriptor_of,
    guard_agent_of,
    kind_of,
    use_devices,
)
from dynamo_trtllm.kv_transfer.nixl.poller import LONGEST_SLEEP_S, PollSteps
from dynamo_trtllm.kv_transfer.nixl.validity import Validity, ValiditySlots, ack_address, with_checksum

PEER_LOADS = 1024  # NIXL keeps what it learned of a peer's memory until the peer is removed as a whole


@dataclass(slots=True)
class RemoteAgent:
    name: str
    known: set[bytes] = field(default_factory=set)  # memory of its offers
    fetches: int = 0
    broken: bool = False


class RemoteAgents:
    """A peer that failed is forgotten: the next fetch reconnects."""

    def __init__(self, vendor: NixlBindings) -> None:
        self._vendor = vendor
        self._met: dict[str, RemoteAgent] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._met)

    def knows(self, offer: NixlOffer) -> bool:
        """Whether it is met at once."""
        peer = self._met.get(offer.agent)
        return peer is not None and (not offer.memory or offer.memory in peer.known)

    @contextlib.contextmanager
    def met(self, offer: NixlOffer) -> Iterator[RemoteAgent]:
        """The offer's holder, connected, and the offer's memory made known."""
        agent = self._vendor.agent
        with self._lock:
            peer = self._met.get(offer.agent)
            if peer is None:
                agent.add_remote_agent(offer.connection)
                self._vendor.guard_agent.add_remote_agent(offer.guards)
                peer = self._met[offer.agent] = RemoteAgent(offer.agent)
            if offer.memory and offer.memory not in peer.known:
                agent.add_remote_agent(offer.memory)
                peer.known.add(offer.memory)
            peer.fetches += 1
        try:
            yield peer
        except self._vendor.errors:
            peer.broken = True
            raise
        finally:
            with self._lock:
                peer.fetches -= 1
                if peer.broken or (len(peer.known) >= PEER_LOADS and peer.fetches == 0):
                    self._forget(peer)

    def disconnect(self, peer: RemoteAgent) -> None:
        """Closes the connection to a peer, which also ends all that still moves over it."""
        with self._lock:
            peer.broken = True
            self._forget(peer)

    def _forget(self, peer: RemoteAgent) -> None:
        if self._met.get(peer.name) is peer:
            del self._met[peer.name]
            for agent, name in (
                (self._vendor.agent, peer.name),
                (self._vendor.guard_agent, guard_agent_of(peer.name)),
            ):
                with contextlib.suppress(*self._vendor.errors):
                    agent.remove_remote_agent(name)

    def close(self) -> None:
        for peer in list(self._met.values()):
            self.disconnect(peer)


_IN_FLIGHT = 4  # reads of one fetch: hides what posting the next one costs


class FetchRequest(NamedTuple):
    """What to fetch and until when (monotonic); `slot` of the own guards takes what the holder's guard says."""

    ticket_id: str
    offer: NixlOffer
    pieces: Sequence[MemoryRegion]
    slot: int
    deadline: float
    on_piece: OnRegion | None
    is_checked: bool


class _AgentRef(NamedTuple):
    agent: Any
    peer: str  # by its name to that agent


class _XferHandle(NamedTuple):
    agent: Any
    handle: Any


class FetchDriver:
    """Fetches of one backend; steps of all of them are taken on one thread."""

    def __init__(self, vendor: NixlBindings, guards: ValiditySlots, checksums: Checksums) -> None:
        self._vendor = vendor
        self._guards = guards
        self._checksums = checksums
        self.peers = RemoteAgents(vendor)

    def read(self, ask: FetchRequest) -> PollSteps:
        """Read an offer; the caller runs the steps to their end. See `TransferBackend.fetch`."""
        if time.monotonic() >= ask.deadline:
            raise TransferTimeout(f"ticket {ask.ticket_id}: too many others were fetched to begin with it in time")
        with (
            self._vendor.translated(f"ticket {ask.ticket_id}: reading from its holder failed"),
            self.peers.met(ask.offer) as peer,
            self._registered([piece for piece in ask.pieces if piece.num_bytes]),
        ):
            run = _FetchState(self._vendor, self.peers, peer, ask, self._guards, self._checksums)
            try:
                yield from run.data()
                yield from run.guard()
            finally:
                yield from run.end_hashing()

    @contextlib.contextmanager
    def _registered(self, pieces: Sequence[MemoryRegion]) -> Iterator[None]:
        """For the time of a fetch, unless they lie in a region that is registered for good."""
        use_devices(pieces)
        if not pieces or self._vendor.region_of(pieces) is not None:
            yield
            return
        handle, _ = self._vendor.register(pieces)
        try:
            yield
        finally:
            self._vendor.agent.deregister_memory(handle)


@dataclass(slots=True)
class _FetchState:
    """The state of one fetch."""

    vendor: NixlBindings
    peers: RemoteAgents
    peer: RemoteAgent
    ask: FetchRequest
    guards: ValiditySlots
    checksums: Checksums
    ready: int = field(init=False)  # pieces
    _moved_at: float = field(default_factory=time.monotonic)
    _hashing: list[list[Future[int]]] = field(default_factory=list)  # by piece and block

    def __post_init__(self) -> None:
        self.ready = self.ask.offer.ready

    def data(self) -> PollSteps:
        """All pieces in order. When this returns or raises, NIXL writes to none of them any more."""
        begun, total = 0, len(self.ask.pieces)
        flying: deque[tuple[int, _XferHandle | None]] = deque()  # by piece; None: a piece without bytes
        try:
            while begun < total or flying:
                while begun < self.ready and len(flying) < _IN_FLIGHT:
                    flying.append((begun, self._begin(begun)))
                    begun += 1
                if flying and self._is_done(flying[0][1]):
                    self._land(*flying.popleft())
                    yield 0.0
                elif not (begun == self.ready < total and (yield from self._more_is_ready())):
                    yield self._waited_s()
        finally:
            if flying:
                yield from self._abort([flight for _, flight in flying if flight is not None])

    def _begin(self, index: int) -> _XferHandle | None:
        piece, offer = self.ask.pieces[index], self.ask.offer
        if not piece.num_bytes:
            return None
        use_devices([piece])
        ours = self.vendor.descriptors(descriptor_of(piece), kind_of([piece]))
        theirs = self.vendor.descriptors(offer.spots[index], offer.kind)
        return self._post(_AgentRef(self.vendor.agent, self.peer.name), "READ", ours, theirs)

    def _post_word(self, verb: str, ours: Descriptor, theirs: Descriptor) -> _XferHandle:
        """Of or for the holder's guard."""
        way = _AgentRef(self.vendor.guard_agent, guard_agent_of(self.peer.name))
        return self._post(way, verb, self.vendor.descriptors(ours, "DRAM"), self.vendor.descriptors(theirs, "DRAM"))

    def _post(self, way: _AgentRef, verb: str, ours: Any, theirs: Any) -> _XferHandle:
        handle = way.agent.initialize_xfer(verb, ours, theirs, way.peer)
        try:
            self._require_alive(way.agent.transfer(handle))
        except BaseException:
            way.agent.release_xfer_handle(handle)
            raise
        return _XferHandle(way.agent, handle)

    def _is_done(self, flight: _XferHandle | None) -> bool:
        return flight is None or self._require_alive(flight.agent.check_xfer_state(flight.handle))

    def _require_alive(self, state: str) -> bool:
        if state not in ("DONE", "PROC"):
            self.peer.broken = True
            raise TransferFailed(f"NIXL ended a read from {self.peer.name} with state {state}")
        return state == "DONE"

    def _land(self, index: int, flight: _XferHandle | None) -> None:
        if flight is not None:
            flight.agent.release_xfer_handle(flight.handle)
        self._moved_at = time.monotonic()
        if self.ask.is_checked:
            self._hashing.append(self.checksums.submit_all(self.ask.pieces[index]))
        if self.ask.on_piece is not None:
            self.ask.on_piece(index)

    def _more_is_ready(self) -> Generator[float, None, bool]:
        before, said = self.ready, (yield from self._look())
        self.ready = min(said.ready, len(self.ask.pieces))
        if self.ready > before:
            self._moved_at = time.monotonic()
        return self.ready > before

    def guard(self) -> PollSteps:
        """Notify the holder that its offer was read.

        Raises TransferFailed when the offer was withdrawn or its checksum differs: the data is invalid.
        """
        self._moved_at = time.monotonic()
        ours = yield from self._checksum()
        held = yield from self._look()
        while ours is not None and not held.checksum:  # the holder is still computing it
            yield self._waited_s()
            held = yield from self._look()
        if ours is not None and ours != held.checksum:
            raise self.checksums.mismatch(self.ask.ticket_id)
        word, place = self.guards.word(self.ask.slot), ack_address(self.ask.offer.guard)
        yield from self._finish(self._post_word("WRITE", word, place))

    def _checksum(self) -> Generator[float, None, int | None]:
        """Return the checksum of the data that was read, once all of it is hashed; None when it is not checked."""
        if not self.ask.is_checked:
            return None
        checksum = NOTHING
        for jobs in self._hashing:
            while not all(job.done() for job in jobs):
                yield self._waited_s()
            checksum = combined(checksum, hashes_of(jobs))
        return checksum

    def end_hashing(self) -> PollSteps:
        """Return when no thread reads the pieces any more."""
        jobs = [job for jobs in self._hashing for job in jobs if not job.cancel()]
        while not all(job.done() for job in jobs):
            yield LONGEST_SLEEP_S

    def _look(self) -> Generator[float, None, Validity]:
        """Read the holder's guard. Raises TransferFailed when the offer was withdrawn."""
        offer, slot = self.ask.offer, self.ask.slot
        ours, theirs = self.guards.spot(slot), offer.guard
        if self.ask.is_checked:
            ours, theirs = with_checksum(ours), with_checksum(theirs)
        yield from self._finish(self._post_word("READ", ours, theirs))
        held = self.guards.look(slot)
        if held.nonce != offer.nonce:
            raise TransferFailed(f"ticket {self.ask.ticket_id}: its holder no longer offers it")
        return held

    def _finish(self, flight: _XferHandle) -> PollSteps:
        done = False
        try:
            while not (done := self._is_done(flight)):
                yield self._waited_s()
        finally:
            if done:
                flight.agent.release_xfer_handle(flight.handle)
            else:
                yield from self._abort([flight])

    def _waited_s(self) -> float:
        now = time.monotonic()
        if now >= self.ask.deadline:
            raise TransferTimeout(f"holder {self.peer.name} did not answer in time")
        return now - self._moved_at

    def _abort(self, flights: list[_XferHandle]) -> PollSteps:
        """Ends reads that did not finish: closing the connection is the only abort that UCX guarantees."""
        self.peers.disconnect(self.peer)
        for flight in flights:
            while True:
                try:
                    flight.agent.release_xfer_handle(flight.handle)
                    break
                except self.vendor.errors:
                    yield LONGEST_SLEEP_S
