"""Fetch one transfer step by step.

A fetch reads the regions as they become ready, verifies the transfer, and acknowledges it. A few
reads are in flight at once. Threads hash the regions that have arrived while further regions
arrive.

The validity slot of the prefill worker says how many regions are ready, and has the checksum. The
fetch reads the slot while it waits for regions, and once more at the end.

NIXL can only be polled. So while a fetch waits, it yields, and other fetches run. It yields the
number of seconds since its last progress. From this, `poller` decides how long to sleep.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dynamo_trtllm.kv_transfer.checksums import NOTHING, Checksums, combined, hashes_of
from dynamo_trtllm.kv_transfer.nixl.bindings import (
    Descriptor,
    NixlBindings,
    NixlOffer,
    descriptor_of,
    kind_of,
    validity_agent_of,
)
from dynamo_trtllm.kv_transfer.nixl.poller import MAX_SLEEP_S, PollSteps
from dynamo_trtllm.kv_transfer.nixl.validity import (
    ACK_BYTES,
    ACK_OFFSET,
    Validity,
    ValiditySlots,
    part_of_slot,
    with_checksum,
)
from dynamo_trtllm.kv_transfer.transfer_backend import Destination
from dynamo_trtllm.protocol.errors import TransferFailed, TransferTimeout

# NIXL frees the metadata of a peer's memory only when the peer is removed. So a peer is removed
# when it is idle and the metadata of this many of its memories was loaded. If the metadata of twice
# as many was loaded, no new fetch begins until the peer is idle.
MAX_KNOWN_MEMORIES = 1024


@dataclass(slots=True)
class RemoteAgent:
    """A connected agent of a prefill worker."""

    name: str
    # The metadata that was loaded, one item for each memory of the worker.
    known_memories: set[bytes] = field(default_factory=set)
    num_fetches: int = 0  # number of fetches that are running
    is_broken: bool = False


class RemoteAgents:
    """The connected agents.

    If an agent fails, it is removed. Then the next fetch connects to it again.
    """

    def __init__(self, bindings: NixlBindings) -> None:
        self._bindings = bindings
        self._connected: dict[str, RemoteAgent] = {}
        self._lock = threading.Lock()

    def is_connected(self, offer: NixlOffer) -> bool:
        """Return whether `connected` needs no connection and no metadata for this offer."""
        peer = self._connected.get(offer.agent)
        return peer is not None and (not offer.memory or offer.memory in peer.known_memories)

    def is_full(self, offer: NixlOffer) -> bool:
        """Return whether a fetch has to wait until the other fetches from its agent have ended."""
        with self._lock:
            peer = self._connected.get(offer.agent)
            if peer is None or not offer.memory or offer.memory in peer.known_memories:
                return False
            return len(peer.known_memories) >= 2 * MAX_KNOWN_MEMORIES

    @contextlib.contextmanager
    def connected(self, offer: NixlOffer) -> Iterator[RemoteAgent]:
        """Keep a connection to the offer's agent for the time of the context.

        If the metadata of the offer's memory is not known yet, it is loaded.
        """
        agent = self._bindings.agent
        with self._lock:
            peer = self._connected.get(offer.agent)
            if peer is None:
                agent.add_remote_agent(offer.connection)
                self._bindings.validity_agent.add_remote_agent(offer.validity_agent)
                peer = RemoteAgent(offer.agent)
                self._connected[offer.agent] = peer
            if offer.memory and offer.memory not in peer.known_memories:
                # NIXL adds the metadata of this memory to the agent, which it knows already.
                agent.add_remote_agent(offer.memory)
                peer.known_memories.add(offer.memory)
            peer.num_fetches += 1
        try:
            yield peer
        except self._bindings.errors:
            peer.is_broken = True
            raise
        finally:
            with self._lock:
                peer.num_fetches -= 1
                has_many_memories = len(peer.known_memories) >= MAX_KNOWN_MEMORIES
                is_worn_out = has_many_memories and peer.num_fetches == 0
                if peer.is_broken or is_worn_out:
                    self._remove(peer)

    def disconnect(self, peer: RemoteAgent) -> None:
        """Close the connection to an agent, which also aborts all reads over it."""
        with self._lock:
            peer.is_broken = True
            self._remove(peer)

    def _remove(self, peer: RemoteAgent) -> None:
        if self._connected.get(peer.name) is peer:
            del self._connected[peer.name]
            with contextlib.suppress(*self._bindings.errors):
                self._bindings.agent.remove_remote_agent(peer.name)
            with contextlib.suppress(*self._bindings.errors):
                validity_name = validity_agent_of(peer.name)
                self._bindings.validity_agent.remove_remote_agent(validity_name)

    def close(self) -> None:
        for peer in list(self._connected.values()):
            self.disconnect(peer)


# Most reads of one fetch that are in flight. With several, the next read is posted before the
# current one ends, so there is no pause between two reads.
_MAX_IN_FLIGHT = 4


class _XferHandle(NamedTuple):
    agent: Any
    handle: Any


class _RegionRead(NamedTuple):
    region_index: int
    xfer: _XferHandle | None  # None: the region has no bytes


@dataclass(slots=True)
class Fetch:
    """One fetch of a transfer.

    `steps` is called once, by the thread that takes the steps of all fetches.
    """

    bindings: NixlBindings
    peers: RemoteAgents
    validity_slots: ValiditySlots
    checksums: Checksums
    transfer_id: str
    offer: NixlOffer
    to: Destination
    slot: int  # a slot of this process, which receives a copy of the prefill worker's slot
    deadline: float  # a time of `time.monotonic`
    is_checked: bool  # the checksum is compared
    _peer: RemoteAgent = field(init=False)
    _ready: int = field(init=False)  # number of regions that can be read
    _progress_at: float = field(init=False)  # time of the last progress
    # The jobs that hash the regions: a list of jobs for each region, one for each block.
    _hashing: list[list[Future[int]]] = field(default_factory=list)

    def steps(self) -> PollSteps:
        """Read the transfer, see `TransferBackend.read`. The caller takes all steps."""
        self._check_deadline()
        while self.peers.is_full(self.offer):
            yield MAX_SLEEP_S
            self._check_deadline()
        failure = f"KV transfer {self.transfer_id}: reading from its prefill worker failed"
        with_bytes = [region for region in self.to.regions if region.num_bytes > 0]
        with (
            self.bindings.translated(failure),
            self.peers.connected(self.offer) as self._peer,
            self.bindings.temporarily_registered(with_bytes),
        ):
            self._progress_at = time.monotonic()
            try:
                yield from self._read_regions()
                yield from self._acknowledge()
            finally:
                yield from self._end_hashing()

    def _check_deadline(self) -> None:
        """Raise TransferTimeout if the deadline has passed before this fetch began."""
        if time.monotonic() >= self.deadline:
            raise TransferTimeout(
                f"KV transfer {self.transfer_id}: too many other fetches ran to start this one in"
                " time"
            )

    def _read_regions(self) -> PollSteps:
        """Read all regions in order.

        When this returns or raises, NIXL no longer writes to any region.
        """
        self._ready = self.offer.ready
        num_regions = len(self.to.regions)
        num_begun = 0
        in_flight: deque[_RegionRead] = deque()
        try:
            while num_begun < num_regions or in_flight:
                while num_begun < self._ready and len(in_flight) < _MAX_IN_FLIGHT:
                    in_flight.append(_RegionRead(num_begun, self._begin(num_begun)))
                    num_begun += 1
                if in_flight and self._is_done(in_flight[0].xfer):
                    self._complete(in_flight.popleft())
                    yield 0.0
                    continue
                # If the reads of all ready regions have begun, look whether more regions are ready.
                is_caught_up = num_begun == self._ready and self._ready < num_regions
                if is_caught_up and (yield from self._more_is_ready()):
                    continue
                yield self._waited_s()
        finally:
            if in_flight:
                yield from self._abort([read.xfer for read in in_flight if read.xfer is not None])

    def _begin(self, index: int) -> _XferHandle | None:
        region = self.to.regions[index]
        if not region.num_bytes:
            return None
        ours = self.bindings.descriptors(descriptor_of(region), kind_of([region]))
        theirs = self.bindings.descriptors(self.offer.descriptors[index], self.offer.kind)
        return self._post(self.bindings.agent, self._peer.name, "READ", ours, theirs)

    def _post_validity(self, verb: str, ours: Descriptor, theirs: Descriptor) -> _XferHandle:
        """Post a read or write of the prefill worker's validity slot."""
        agent = self.bindings.validity_agent
        peer = validity_agent_of(self._peer.name)
        our_memory = self.bindings.descriptors(ours, "DRAM")
        their_memory = self.bindings.descriptors(theirs, "DRAM")
        return self._post(agent, peer, verb, our_memory, their_memory)

    def _post(self, agent: Any, peer: str, verb: str, ours: Any, theirs: Any) -> _XferHandle:
        """Post a read or write. `peer` is the name of the prefill worker's agent."""
        handle = agent.initialize_xfer(verb, ours, theirs, peer)
        try:
            self._check_state(agent.transfer(handle))
        except BaseException:
            # The caller does not get the handle, so it is released here.
            agent.release_xfer_handle(handle)
            raise
        return _XferHandle(agent, handle)

    def _is_done(self, xfer: _XferHandle | None) -> bool:
        return xfer is None or self._check_state(xfer.agent.check_xfer_state(xfer.handle))

    def _check_state(self, state: str) -> bool:
        """Raise TransferFailed if a transfer has failed. Return whether it is done."""
        if state not in ("DONE", "PROC"):
            self._peer.is_broken = True
            raise TransferFailed(
                f"a NIXL transfer with agent {self._peer.name} ended in state {state}"
            )
        return state == "DONE"

    def _complete(self, read: _RegionRead) -> None:
        if read.xfer is not None:
            read.xfer.agent.release_xfer_handle(read.xfer.handle)
        self._progress_at = time.monotonic()
        if self.is_checked:
            self._hashing.append(self.checksums.submit_all(self.to.regions[read.region_index]))
        if self.to.on_region is not None:
            self.to.on_region(read.region_index)

    def _more_is_ready(self) -> Generator[float, None, bool]:
        """Read how many regions are ready. Return whether there are more than before."""
        before = self._ready
        validity = yield from self._read_validity()
        self._ready = min(validity.ready, len(self.to.regions))
        has_more = self._ready > before
        if has_more:
            self._progress_at = time.monotonic()
        return has_more

    def _acknowledge(self) -> PollSteps:
        """Verify the transfer, and notify the prefill worker that it was read.

        Raises:
            TransferFailed: the data is invalid, because the transfer was unpublished or its
                checksum differs.
        """
        self._progress_at = time.monotonic()
        our_checksum = yield from self._checksum()
        validity = yield from self._read_validity()
        # The checksum is 0 while the prefill worker is still computing it.
        while our_checksum is not None and validity.checksum == 0:
            yield self._waited_s()
            validity = yield from self._read_validity()
        if our_checksum is not None and our_checksum != validity.checksum:
            raise self.checksums.mismatch(self.transfer_id)
        # The acknowledgment is the first ACK_BYTES of the nonce. Our slot has a copy of the nonce,
        # because the last read has copied the prefill worker's slot into it.
        ack_word = part_of_slot(self.validity_slots.descriptor(self.slot), ACK_BYTES)
        ack_at = part_of_slot(self.offer.validity_slot, ACK_BYTES, ACK_OFFSET)
        yield from self._finish(self._post_validity("WRITE", ack_word, ack_at))

    def _checksum(self) -> Generator[float, None, int | None]:
        """Return the checksum of the data once all data is hashed.

        None: the checksum is not compared.
        """
        if not self.is_checked:
            return None
        checksum = NOTHING
        for jobs in self._hashing:
            while not all(job.done() for job in jobs):
                yield self._waited_s()
            checksum = combined(checksum, hashes_of(jobs))
        return checksum

    def _end_hashing(self) -> PollSteps:
        """Cancel the jobs that hash the regions, and wait for those that are running."""
        running: list[Future[int]] = []
        for jobs in self._hashing:
            running += [job for job in jobs if not job.cancel()]
        while not all(job.done() for job in running):
            yield MAX_SLEEP_S

    def _read_validity(self) -> Generator[float, None, Validity]:
        """Read the prefill worker's validity slot.

        Raises:
            TransferFailed: the transfer was unpublished.
        """
        ours = self.validity_slots.descriptor(self.slot)
        theirs = self.offer.validity_slot
        if self.is_checked:
            ours = with_checksum(ours)
            theirs = with_checksum(theirs)
        yield from self._finish(self._post_validity("READ", ours, theirs))
        validity = self.validity_slots.get(self.slot)
        if validity.nonce != self.offer.nonce:
            raise TransferFailed(
                f"KV transfer {self.transfer_id} is no longer published by its prefill worker"
            )
        return validity

    def _finish(self, xfer: _XferHandle) -> PollSteps:
        """Wait until a read or write is done, and release its handle."""
        is_done = False
        try:
            is_done = self._is_done(xfer)
            while not is_done:
                yield self._waited_s()
                is_done = self._is_done(xfer)
        finally:
            if is_done:
                xfer.agent.release_xfer_handle(xfer.handle)
            else:
                yield from self._abort([xfer])

    def _waited_s(self) -> float:
        """Return the seconds since the last progress. Raises TransferTimeout after the deadline."""
        now = time.monotonic()
        if now >= self.deadline:
            raise TransferTimeout(
                f"KV transfer {self.transfer_id}: prefill worker {self._peer.name} did not answer"
                " in time"
            )
        return now - self._progress_at

    def _abort(self, xfers: list[_XferHandle]) -> PollSteps:
        """Abort reads by closing the connection. UCX guarantees no other way to abort them."""
        self.peers.disconnect(self._peer)
        for xfer in xfers:
            while True:
                try:
                    xfer.agent.release_xfer_handle(xfer.handle)
                    break
                except self.bindings.errors:
                    # Releasing the handle fails until the read is aborted.
                    yield MAX_SLEEP_S
