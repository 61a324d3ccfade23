"""Keep the router's knowledge of prefix caches up to date.

The knowledge comes from the registered instances and their KV events. A frontend that is new, or
that missed an update of a worker, asks the worker to publish everything again (a resync).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.prefix_index import ClusterPrefixes
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.protocol.errors import BadFrame, DynamoError
from dynamo_trtllm.protocol.kv_events import KvCacheUpdate, kv_events_subject
from dynamo_trtllm.protocol.messages import Instance, ResyncKvEvents, decode
from dynamo_trtllm.support.background import wait_for_first

log = logging.getLogger(__name__)

# The pause after the first request for a snapshot. It doubles with each further request.
PAUSE_S: Final = 2.0
_MAX_PAUSE_S = 30.0
_TIMEOUT_S = 2.0  # longest wait for the reply to a request for a snapshot, and for the snapshot
# Limit of the workers that send snapshots at the same time: to read the snapshot of a large cache
# takes tens of ms of CPU time, in which streams wait.
_MAX_SNAPSHOTS = 8
# After this many requests without a snapshot, the worker's blocks are forgotten.
_MAX_UNANSWERED = 3


@dataclass(eq=False)
class PrefixFeed:
    """Updates `known` from the instances of `view`.

    If `known` reads events, the KV events of the namespace update it, too.
    """

    known: ClusterPrefixes
    view: ClusterView
    plane: RequestPlane
    namespace: str
    metrics: FrontendMetrics
    pause_s: float = PAUSE_S

    def __post_init__(self) -> None:
        self._changes = self.view.subscribe()
        # The resyncs of workers that are not in sync, by instance id.
        self._resyncs: dict[int, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_MAX_SNAPSHOTS)
        self._wake = asyncio.Event()  # set when a worker gets in sync, or out of sync
        self._num_unreadable = 0  # how many messages could not be read

    async def run(self) -> None:
        """Run until cancelled."""
        async with AsyncExitStack() as stack:
            if self.known.reads_events:
                subject = kv_events_subject(self.namespace)
                stack.push_async_callback(await self.plane.subscribe(subject, self._on_message))
            group = await stack.enter_async_context(asyncio.TaskGroup())
            while True:
                changed = self.view.changed
                self._wake.clear()
                # The last change of each instance; None: it was removed.
                latest = {
                    instance.id: instance if is_added else None
                    for instance, is_added in self._changes
                }
                self._changes.clear()
                for instance_id, instance in latest.items():
                    if instance is None:
                        self.known.remove_instance(instance_id)
                    else:
                        self.known.add_instance(instance)
                self._update_resyncs(group)
                await wait_for_first(changed.wait(), self._wake.wait())

    def _on_message(self, data: bytes, _reply: str) -> None:
        try:
            update = decode(data, KvCacheUpdate)
            was_unsynced = update.instance_id in self.known.unsynced
            self.known.on_update(update)
        except (BadFrame, ValueError) as exc:
            self.metrics.child("kv_updates_total", "unreadable").inc()
            self._num_unreadable += 1
            if self._num_unreadable.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th …
                log.warning(
                    "unreadable KV events dropped (%d so far): %s", self._num_unreadable, exc
                )
            return
        is_unsynced = update.instance_id in self.known.unsynced
        outcome = "gap" if is_unsynced and not was_unsynced else "applied"
        self.metrics.child("kv_updates_total", outcome).inc()
        if is_unsynced != (update.instance_id in self._resyncs):
            # `run` has to start or to cancel the resync of this worker.
            self._wake.set()

    def _update_resyncs(self, group: asyncio.TaskGroup) -> None:
        """Run one task for each worker that is not in sync."""
        unsynced = self.known.unsynced
        for instance_id in self._resyncs.keys() - unsynced:
            self._resyncs.pop(instance_id).cancel()
        for instance_id in unsynced - self._resyncs.keys():
            instance = self.view.instance(instance_id)
            if instance is not None:
                self._resyncs[instance_id] = group.create_task(
                    self._resync(instance), name=f"kv-resync-{instance_id:x}"
                )

    async def _resync(self, instance: Instance) -> None:
        """Ask a worker for snapshots, with longer and longer pauses.

        The task of this resync is cancelled when the worker is in sync.
        """
        pause_s = self.pause_s
        failure = ""
        for count in itertools.count():
            async with self._slots:
                if count == _MAX_UNANSWERED:
                    text = "worker %x did not send its prefix cache, asked %d times: %s"
                    log.warning(text, instance.id, count, failure)
                    # The worker may be in sync by now.
                    if instance.id in self.known.unsynced:
                        self.known.forget(instance.id)
                self.metrics.child("kv_updates_total", "resync").inc()
                try:
                    await self.plane.client.control(
                        instance.subject, ResyncKvEvents(), timeout_s=_TIMEOUT_S
                    )
                    failure = "it accepts requests but publishes nothing"
                    # The snapshot takes a moment to arrive.
                    await asyncio.sleep(min(_TIMEOUT_S, self.pause_s))
                except DynamoError as exc:
                    failure = f"{exc.code}: {exc.message}"
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
