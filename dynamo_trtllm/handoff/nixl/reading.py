"""One fetch, step by step: pieces as they become ready, a few in flight, then the guard, and a word to the holder.

NIXL can only be polled: each fetch lets others have their turn while it waits, see `moving`.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dynamo_trtllm.errors import HandoffTimeout, TransferFailed
from dynamo_trtllm.handoff.base import OnPiece, Piece
from dynamo_trtllm.handoff.nixl.guards import Guards, place_of_word
from dynamo_trtllm.handoff.nixl.moving import LONGEST_SLEEP_S, Steps
from dynamo_trtllm.handoff.nixl.peers import Peer, Peers
from dynamo_trtllm.handoff.nixl.vendor import Offer, Spot, Vendor, kind_of, spot_of, use_devices

_IN_FLIGHT = 4  # reads of one fetch: hides what posting the next one costs


class Ask(NamedTuple):
    """What to fetch and until when (monotonic); `slot` of the own guards takes what the holder's guard says."""

    ticket_id: str
    offer: Offer
    pieces: Sequence[Piece]
    slot: int
    deadline: float
    on_piece: OnPiece | None


class _Flight(NamedTuple):
    piece: int
    handle: Any  # None: a piece without bytes


class Reader:
    """Fetches of one carrier; steps of all of them are taken on one thread."""

    def __init__(self, vendor: Vendor, guards: Guards) -> None:
        self._vendor = vendor
        self._guards = guards
        self.peers = Peers(vendor)

    def read(self, ask: Ask) -> Steps:
        """Must be taken to its end. See `Carrier.fetch`."""
        if time.monotonic() >= ask.deadline:
            raise HandoffTimeout(f"ticket {ask.ticket_id}: too many others were fetched to begin with it in time")
        with (
            self._vendor.translated(f"ticket {ask.ticket_id}: reading from its holder failed"),
            self.peers.met(ask.offer) as peer,
            self._registered([piece for piece in ask.pieces if piece.num_bytes]),
        ):
            run = _Run(self._vendor, self.peers, peer, ask, self._guards)
            yield from run.data()
            yield from run.guard()

    @contextlib.contextmanager
    def _registered(self, pieces: Sequence[Piece]) -> Iterator[None]:
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
class _Run:
    """The state of one fetch."""

    vendor: Vendor
    peers: Peers
    peer: Peer
    ask: Ask
    guards: Guards
    ready: int = field(init=False)
    _moved_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.ready = self.ask.offer.ready

    def data(self) -> Steps:
        """All pieces in order. When this returns or raises, NIXL writes to none of them any more."""
        begun, total = 0, len(self.ask.pieces)
        flying: deque[_Flight] = deque()
        try:
            while begun < total or flying:
                while begun < self.ready and len(flying) < _IN_FLIGHT:
                    flying.append(self._begin(begun))
                    begun += 1
                if flying and self._is_done(flying[0]):
                    self._land(flying.popleft())
                    yield 0.0
                elif not (begun == self.ready < total and (yield from self._more_is_ready())):
                    yield self._waited_s()
        finally:
            if flying:
                yield from self._abort([flight.handle for flight in flying if flight.handle is not None])

    def _begin(self, index: int) -> _Flight:
        piece, offer = self.ask.pieces[index], self.ask.offer
        if not piece.num_bytes:
            return _Flight(index, None)
        use_devices([piece])
        kind = kind_of([piece])
        handle = self._post("READ", (spot_of(piece), kind), (offer.spots[index], offer.kind))
        return _Flight(index, handle)

    def _post(self, verb: str, ours: tuple[Spot, str], theirs: tuple[Spot, str]) -> Any:
        agent = self.vendor.agent
        handle = agent.initialize_xfer(
            verb, self.vendor.descriptors(*ours), self.vendor.descriptors(*theirs), self.peer.name
        )
        try:
            self._require_alive(agent.transfer(handle))
        except BaseException:
            agent.release_xfer_handle(handle)
            raise
        return handle

    def _is_done(self, flight: _Flight) -> bool:
        return flight.handle is None or self._require_alive(self.vendor.agent.check_xfer_state(flight.handle))

    def _require_alive(self, state: str) -> bool:
        if state not in ("DONE", "PROC"):
            self.peer.broken = True
            raise TransferFailed(f"NIXL ended a read from {self.peer.name} with state {state}")
        return state == "DONE"

    def _land(self, flight: _Flight) -> None:
        if flight.handle is not None:
            self.vendor.agent.release_xfer_handle(flight.handle)
        self._moved_at = time.monotonic()
        if self.ask.on_piece is not None:
            self.ask.on_piece(flight.piece)

    def _more_is_ready(self) -> Generator[float, None, bool]:
        before, said = self.ready, (yield from self._look())
        self.ready = min(said, len(self.ask.pieces))
        if self.ready > before:
            self._moved_at = time.monotonic()
        return self.ready > before

    def guard(self) -> Steps:
        """Tells the holder that its offer was read. Raises TransferFailed when it no longer stood: the data is void."""
        self._moved_at = time.monotonic()
        yield from self._look()
        word, place = self.guards.word(self.ask.slot), place_of_word(self.ask.offer.guard)
        yield from self._finish(self._post("WRITE", (word, "DRAM"), (place, "DRAM")))

    def _look(self) -> Generator[float, None, int]:
        """How many pieces the holder says are ready. Raises TransferFailed when the offer no longer stands."""
        offer, slot = self.ask.offer, self.ask.slot
        yield from self._finish(self._post("READ", (self.guards.spot(slot), "DRAM"), (offer.guard, "DRAM")))
        held = self.guards.look(slot)
        if held.nonce != offer.nonce:
            raise TransferFailed(f"ticket {self.ask.ticket_id}: its holder no longer offers it")
        return held.ready

    def _finish(self, handle: Any) -> Steps:
        flight, done = _Flight(-1, handle), False
        try:
            while not (done := self._is_done(flight)):
                yield self._waited_s()
        finally:
            if done:
                self.vendor.agent.release_xfer_handle(handle)
            else:
                yield from self._abort([handle])

    def _waited_s(self) -> float:
        now = time.monotonic()
        if now >= self.ask.deadline:
            raise HandoffTimeout(f"holder {self.peer.name} did not answer in time")
        return now - self._moved_at

    def _abort(self, handles: list[Any]) -> Steps:
        """Ends reads that did not finish: closing the connection is the only abort that UCX guarantees."""
        self.peers.disconnect(self.peer)
        for handle in handles:
            while True:
                try:
                    self.vendor.agent.release_xfer_handle(handle)
                    break
                except self.vendor.errors:
                    yield LONGEST_SLEEP_S
