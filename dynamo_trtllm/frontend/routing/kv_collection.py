"""Fetch the KV of requests that were cancelled, where nothing else frees it at the prefill worker.

TensorRT-LLM frees the KV of a finished prefill call when a decode worker has fetched it, or after a
timeout of about a minute. A release or an abort does not free it (`release_kv` in
engines/trtllm/library.py has the sources). After many cancels, a prefill worker would hold nothing
but such KV, and reject prompts. NVIDIA Dynamo therefore sends the decode call even if the client
has left. Workers that behave so have `Instance.keeps_unfetched_kv`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from dynamo_trtllm.cluster.request_plane.background_control import BackgroundControl
from dynamo_trtllm.cluster.request_plane.client import PlaneClient
from dynamo_trtllm.cluster.request_plane.receivers import StreamReceiver
from dynamo_trtllm.kv_transfer.transfer_backend import collecting_call
from dynamo_trtllm.observability.logging import short_id
from dynamo_trtllm.protocol.errors import MigrationFailed
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    Instance,
    KvTransferParams,
    ReleaseKv,
    ReleaseOutcome,
)
from dynamo_trtllm.protocol.streams import StreamEvent

log = logging.getLogger(__name__)

_LOWEST_PRIORITY = 1 << 20  # the priority of a collection, which comes after all requests

COLLECTED = "ok"
NOTHING = "nothing"  # the prefill call ended without KV
TIMED_OUT = "collection_timeout"
TOO_MANY = "too_many"


class KvCollector:
    """The collections of a frontend, each of which is one decode call. Close it after all requests.

    A collection holds neither a client's response nor its place in admission. It is not retried: if
    its call fails, for example because the decode worker is full, the KV waits for the library's
    timeout.
    """

    # Longest collection, in seconds: equal to KV_WAIT_S in engines/external/runner.py.
    collection_s = 30.0
    # Limit of the collections at the same time. The KV of further requests stays until the
    # library's timeout.
    max_collections = 1024
    # Longest wait for the collections in progress when the frontend stops, in seconds.
    close_s = 5.0

    def __init__(
        self,
        plane: PlaneClient,
        control: BackgroundControl,
        on_end: Callable[[str], None],
    ) -> None:
        """Initialize without collections.

        Args:
            plane: sends the decode calls.
            control: sends messages to prefill workers about the end of a transfer.
            on_end: receives the outcome of each collection: one of the constants above, or the code
                of the error that ended its call.
        """
        self.plane = plane
        self.control = control
        self.on_end = on_end
        self._running: set[KvCollection] = set()
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of collections in progress."""
        return len(self._running)

    def collect(
        self,
        call: StreamReceiver | None,
        prefill: Instance,
        decode: Instance,
        request: GenerateRequest,
    ) -> None:
        """Collect the KV of a cancelled request.

        Args:
            call: the request's current call, which has no tokens yet. A decode call goes on, a
                prefill call is stopped. None: a decode call could not be started.
            prefill: the worker that holds the KV, or may hold it when the prefill call has ended.
            decode: the worker that is to fetch it.
            request: the decode call; without KV transfer parameters while the prefill call runs.
        """
        if len(self._running) >= self.max_collections:
            self._drop(call, prefill, request)
        elif request.kv_params is not None:
            self._begin(prefill, decode, request).follow_decode(call, request.kv_params)
        elif call is not None and call.stop():
            self._begin(prefill, decode, request).follow_prefill(call)
        elif call is not None:
            # The call has ended already, or the worker may not have received it.
            call.cancel()

    def _begin(self, prefill: Instance, decode: Instance, request: GenerateRequest) -> KvCollection:
        collection = KvCollection(self, prefill, decode, request)
        self._running.add(collection)
        self._idle.clear()
        return collection

    def _drop(
        self,
        call: StreamReceiver | None,
        prefill: Instance,
        request: GenerateRequest,
    ) -> None:
        if call is not None:
            call.cancel()
        if request.kv_params is not None:
            message = ReleaseKv(request.kv_params.transfer_id, ReleaseOutcome.ABORTED)
            self.control.send(prefill, message)
            self.on_end(TOO_MANY)

    def ended(self, collection: KvCollection, outcome: str) -> None:
        """Forget a collection and count it."""
        self._running.discard(collection)
        if not self._running:
            self._idle.set()
        self.on_end(outcome)

    async def aclose(self) -> None:
        """Wait a bounded time for the collections in progress, then cancel them."""
        if not self._running:
            return
        try:
            async with asyncio.timeout(self.close_s):
                await self._idle.wait()
        except TimeoutError:
            for collection in list(self._running):
                collection.end(TIMED_OUT)


class KvCollection:
    """One collection, which one of the two methods `follow_...` begins.

    It ends with the first chunk or the error of its decode call, or after `collection_s`.
    """

    __slots__ = (
        "_call",
        "_collector",
        "_decode",
        "_kv_params",
        "_prefill",
        "_request",
        "_timer",
    )

    def __init__(
        self,
        collector: KvCollector,
        prefill: Instance,
        decode: Instance,
        request: GenerateRequest,
    ) -> None:
        self._collector = collector
        self._prefill = prefill
        self._decode = decode
        self._request = request
        self._kv_params: KvTransferParams | None = None  # None: there may be no KV
        self._call: StreamReceiver | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(collector.collection_s, self.end, TIMED_OUT)

    def follow_prefill(self, call: StreamReceiver) -> None:
        """Wait for the end of a prefill call that was stopped. If it ended with KV, fetch it."""
        self._call = call
        call.redirect(self._on_prefill_event)

    def follow_decode(self, call: StreamReceiver | None, kv_params: KvTransferParams) -> None:
        """Wait for the first chunk of a running decode call. If `call` is None, start a call."""
        if call is None:
            self._fetch(kv_params)
            return
        self._call = call
        self._kv_params = kv_params
        call.redirect(self._on_decode_event)

    def _fetch(self, kv_params: KvTransferParams) -> None:
        """Call the decode worker only for the fetch, after all requests if it knows priorities."""
        knows_priorities = "priority" in self._decode.supported_features
        call = collecting_call(
            self._request,
            kv_params,
            deadline=time.time() + self._collector.collection_s,
            priority=_LOWEST_PRIORITY if knows_priorities else 0,
        )
        plane = self._collector.plane
        self._kv_params = kv_params
        self._call = plane.generate(self._decode.subject, call, self._on_decode_event)

    def _on_prefill_event(self, event: StreamEvent) -> None:
        if isinstance(event, MigrationFailed):  # the normal end of a stopped call without KV
            self.end(NOTHING)
        elif not isinstance(event, Chunk):
            self.end(event.code)
        elif event.kv_params is not None:
            self._fetch(event.kv_params)
        elif event.finish_reason is not None:
            self.end(NOTHING)

    def _on_decode_event(self, event: StreamEvent) -> None:
        self.end(COLLECTED if isinstance(event, Chunk) else event.code)

    def end(self, outcome: str) -> None:
        """End the collection, and tell the prefill worker what became of its KV. Called once."""
        self._timer.cancel()
        if self._call is not None:
            self._call.cancel()  # a call that has ended ignores this
        if self._kv_params is not None:
            self._release(self._kv_params, outcome)
        self._collector.ended(self, outcome)

    def _release(self, kv_params: KvTransferParams, outcome: str) -> None:
        is_fetched = outcome == COLLECTED
        release = ReleaseOutcome.FETCHED if is_fetched else ReleaseOutcome.ABORTED
        self._collector.control.send(self._prefill, ReleaseKv(kv_params.transfer_id, release))
        if not is_fetched:
            text = "request %s: its KV stays on prefill worker %x until the library's timeout (%s)"
            log.info(text, short_id(self._request.request_id), self._prefill.id, outcome)
