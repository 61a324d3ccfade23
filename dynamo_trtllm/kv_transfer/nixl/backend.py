"""Implement the KV transfer backend over NIXL.

The backend uses three threads. One registers memory, one runs the fetches, and one listens for the
acknowledgments of readers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from dynamo_trtllm.kv_transfer.checksums import Checksums, OfferChecksum, end_jobs
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.memory import MemoryRegion, require_sizes
from dynamo_trtllm.kv_transfer.nixl.bindings import (
    NixlBindings,
    NixlOffer,
    RegisteredMemory,
    descriptor_of,
    kind_of,
)
from dynamo_trtllm.kv_transfer.nixl.fetch import Fetch, RemoteAgents
from dynamo_trtllm.kv_transfer.nixl.poller import TransferPoller
from dynamo_trtllm.kv_transfer.nixl.validity import ValiditySlots
from dynamo_trtllm.kv_transfer.transfer_backend import Destination, decode_offer
from dynamo_trtllm.protocol.errors import EngineFailed, TransferFailed
from dynamo_trtllm.protocol.messages import encode

log = logging.getLogger(__name__)

# The shortest and the longest pause between two checks for acknowledgments.
_SHORTEST_WAIT_S = 0.0002
_MAX_WAIT_S = 0.005
# The listener checks for this time after the last transfer has ended. Some transports need this
# to serve late readers.
_LINGER_S = 2.0


@dataclass(slots=True, kw_only=True)
class _NixlPublished:
    slot: int  # number of the validity slot
    in_region: bool  # the memory is part of a registered region, or has no bytes
    # NIXL's handle of the memory, if the memory is registered for this transfer only.
    registered: Any | None = None
    checksum: OfferChecksum | None = None


class NixlBackend:
    """A KV transfer backend over NIXL, for CPU and CUDA memory.

    All regions on one side of a transfer must be of one kind of memory.
    """

    name = "nixl/ucx"
    address = ""  # UCX listens at addresses of its own choice

    def __init__(self, checksums: Checksums | None = None) -> None:
        self.checksums = checksums or Checksums()
        # Part of `TransferBackend`. It can't check readers, because UCX serves every reader that
        # has the offer.
        self.guard = TransferGuard()
        self._bindings = NixlBindings()
        self._agent_name = f"dynamo-{uuid.uuid4().hex}"
        self._validity_slots = ValiditySlots()
        self._peers = RemoteAgents(self._bindings)
        self._published: dict[str, _NixlPublished] = {}
        self._wake = threading.Condition()
        self._ending: asyncio.Task[None] | None = None  # set when closing begins
        self.prepare_thread: Callable[[], None] = lambda: None

    async def start(self, on_fetched: Callable[[str], None]) -> None:
        """Open the NIXL agents and start the threads, see `TransferBackend.start`.

        Raises:
            ConfigError: NIXL can't start its UCX backend.
        """
        self._loop = asyncio.get_running_loop()
        self._on_fetched = on_fetched
        self.prepare_thread()  # reads may begin on this thread, too
        self._fetching = TransferPoller("nixl-fetch", self.prepare_thread)
        self._registering = ThreadPoolExecutor(1, "nixl-register", initializer=self.prepare_thread)
        opening = self._registering.submit(
            self._bindings.open, self._agent_name, self._validity_slots
        )
        self._connection, self._validity_connection = await asyncio.wrap_future(opening)
        self._listener = threading.Thread(target=self._listen, name="nixl-notices", daemon=True)
        self._listener.start()

    def check(self) -> None:
        if self._bindings.agent is None or self._ending is not None:
            return
        threads = (self._listener, self._fetching.thread)
        ended_threads = [thread.name for thread in threads if not thread.is_alive()]
        if ended_threads:
            names = " and ".join(ended_threads)
            raise EngineFailed(
                f"KV transfer over {self.name} has stopped: thread {names} ended; restart the"
                " worker"
            )

    def _require_running(self, wanted: str) -> None:
        if self._bindings.agent is None or self._ending is not None:
            raise TransferFailed(f"transfer backend nixl is not running; start it before {wanted}")

    def address_in(self, offer: bytes, transfer_id: str) -> str:
        return ""

    async def register(self, region: MemoryRegion) -> None:
        self._require_running("registering memory")
        registering = self._registering.submit(self._register, region)
        await asyncio.shield(asyncio.wrap_future(registering))

    def _register(self, region: MemoryRegion) -> None:
        """Register a region. Runs on the registration thread."""
        with self._bindings.translated(
            f"can't register {region.num_bytes >> 20} MiB of {region.device}"
        ):
            handle, memory = self._bindings.register([region])
            self._bindings.registered.append(RegisteredMemory(region, handle, memory))

    # --- prefill worker ---------------------------------------------------------------------------

    async def publish(
        self, transfer_id: str, regions: Sequence[MemoryRegion], *, ready: int | None = None
    ) -> bytes:
        self._require_running("publishing KV")
        if transfer_id in self._published:
            raise TransferFailed(
                f"KV transfer {transfer_id} is already published; unpublish it first"
            )
        if ready is None:
            ready = len(regions)
        kind = kind_of(regions)
        nonempty = [region for region in regions if region.num_bytes > 0]
        slot = self._validity_slots.acquire()
        nonce = self._validity_slots.activate(slot, ready)
        registered = self._bindings.region_of(nonempty)
        needs_registration = bool(nonempty) and registered is None
        self._published[transfer_id] = _NixlPublished(slot=slot, in_region=not needs_registration)
        if not nonempty:
            memory = b""
        elif registered is not None:
            memory = registered.memory
        else:
            registering = self._registering.submit(self._register_alone, transfer_id, nonempty)
            memory = await asyncio.shield(asyncio.wrap_future(registering))
        method = self.checksums.method(regions)
        entry = self._published.get(transfer_id)
        # `aclose` may have discarded the entry during the registration.
        if method and entry is not None:
            set_checksum = partial(self._validity_slots.set_checksum, slot)
            entry.checksum = OfferChecksum(self.checksums, tuple(regions), set_checksum)
            entry.checksum.mark_ready(self._validity_slots.get(slot).ready)
        with self._wake:
            self._wake.notify()
        offer = NixlOffer(
            agent=self._agent_name,
            connection=self._connection,
            validity_agent=self._validity_connection,
            memory=memory,
            kind=kind,
            descriptors=[descriptor_of(region) for region in regions],
            validity_slot=self._validity_slots.descriptor(slot),
            nonce=nonce,
            # More regions may have become ready during the registration.
            ready=self._validity_slots.get(slot).ready,
            checksum=method,
        )
        return encode(offer)

    def _register_alone(self, transfer_id: str, regions: Sequence[MemoryRegion]) -> bytes:
        """Register the memory of one transfer, and return NIXL's metadata for readers.

        Runs on the registration thread. `_discard` later runs on the same thread.
        """
        with self._bindings.translated(f"KV transfer {transfer_id}: can't register its memory"):
            handle, memory = self._bindings.register(regions)
            self._published[transfer_id].registered = handle
        return memory

    def mark_ready(self, transfer_id: str, ready: int) -> None:
        entry = self._published.get(transfer_id)
        if entry is None:
            return
        self._validity_slots.mark_ready(entry.slot, ready)
        if entry.checksum is not None:
            entry.checksum.mark_ready(ready)

    async def unpublish(self, transfer_id: str) -> None:
        entry = self._published.get(transfer_id)
        if entry is None:
            return
        # The slot is cleared first, so that every read that ends later fails.
        self._validity_slots.clear(entry.slot)
        try:
            if entry.checksum is not None:
                # The checksum reads the memory and writes to the slot.
                await entry.checksum.stop()
        finally:
            if self._ending is not None:  # `aclose` discards all transfers
                await asyncio.shield(self._ending)
            elif entry.in_region:
                self._discard(transfer_id)
            else:
                discarding = self._registering.submit(self._discard, transfer_id)
                await asyncio.shield(asyncio.wrap_future(discarding))

    def _discard(self, transfer_id: str) -> None:
        """Discard a transfer.

        If memory was registered for the transfer, this runs on the registration thread.
        """
        entry = self._published.pop(transfer_id, None)
        if entry is None:
            return
        self._validity_slots.release(entry.slot)
        if entry.registered is not None:
            with self._bindings.translated("can't deregister memory"):
                self._bindings.agent.deregister_memory(entry.registered)

    def _listen(self) -> None:
        """Run the listener thread.

        While KV is published, the thread looks for acknowledgments and lets NIXL make progress.
        """
        self.prepare_thread()
        wait_s = _SHORTEST_WAIT_S
        published_at = 0.0  # the last time at which KV was published
        while True:
            with self._wake:
                if self._ending is not None:
                    return
                if self._published:
                    published_at = time.monotonic()
                is_needed = time.monotonic() < published_at + _LINGER_S
                woken = self._wake.wait(wait_s if is_needed else None)
            try:
                self._bindings.progress()
            except self._bindings.errors:
                log.warning("KV transfer over nixl: making progress failed", exc_info=True)
            any_read = False
            for transfer_id, entry in list(self._published.items()):
                if self._validity_slots.was_read(entry.slot):
                    any_read = True
                    self._loop.call_soon_threadsafe(self._on_fetched, transfer_id)
            # Check often after a publication or an acknowledgment, and then less and less often.
            if woken or any_read:
                wait_s = _SHORTEST_WAIT_S
            else:
                wait_s = min(2 * wait_s, _MAX_WAIT_S)

    # --- decode worker ----------------------------------------------------------------------------

    async def read(
        self, transfer_id: str, offer: bytes, to: Destination, *, timeout_s: float
    ) -> None:
        """Read a transfer, see `TransferBackend.read`.

        If this call is cancelled, it returns only when the fetch has ended. This takes at most
        `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        decoded_offer = decode_offer(NixlOffer, offer, transfer_id, self.name)
        require_sizes(transfer_id, decoded_offer.sizes_bytes, to.regions)
        self._require_running("fetching KV")
        is_checked = self.checksums.is_checked(transfer_id, decoded_offer.checksum, to.regions)
        slot = self._validity_slots.acquire()
        fetch = Fetch(
            bindings=self._bindings,
            peers=self._peers,
            validity_slots=self._validity_slots,
            checksums=self.checksums,
            transfer_id=transfer_id,
            offer=decoded_offer,
            to=to,
            slot=slot,
            deadline=deadline,
            is_checked=is_checked,
        )
        # The first step may be taken on the event loop if it only starts a copy by the GPU, which
        # is fast. Connecting to an agent and copies by the CPU take too long.
        step_now = decoded_offer.kind == "VRAM" and self._peers.is_connected(decoded_offer)
        try:
            work = self._fetching.submit(fetch.steps(), step_now=step_now)
            try:
                await asyncio.wrap_future(work)
            except asyncio.CancelledError:
                # The caller frees its memory after this, so wait until nothing writes to it.
                await end_jobs([work])
                raise
        finally:
            self._validity_slots.release(slot)

    # --- the end ----------------------------------------------------------------------------------

    async def aclose(self) -> None:
        if self._bindings.agent is None or self._ending is not None:
            return
        with self._wake:
            self._ending = asyncio.create_task(asyncio.to_thread(self._close), name="nixl-close")
            self._wake.notify()
        await asyncio.shield(self._ending)

    def _close(self) -> None:
        self._fetching.shutdown()
        self.checksums.close()
        self._registering.submit(self._release_all)
        self._registering.shutdown()
        self._listener.join()
        self._bindings.agent = None
        self._bindings.validity_agent = None

    def _release_all(self) -> None:
        """Discard all transfers and deregister all memory.

        This is the last job of the registration thread.
        """
        for transfer_id in list(self._published):
            self._discard(transfer_id)
        self._peers.close()
        while self._bindings.registered:
            memory = self._bindings.registered.pop()
            with self._bindings.translated("can't deregister memory"):
                self._bindings.agent.deregister_memory(memory.handle)
