"""Keep the router's knowledge of prefix caches up to date: follow the instances and read their KV events.

A frontend that is new, or that missed an update of a worker, asks the worker to publish everything again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Final

from dynamo_trtllm.background import first_of
from dynamo_trtllm.errors import BadFrame, DynamoError
from dynamo_trtllm.kv_events import KvCacheUpdate, kv_events_subject
from dynamo_trtllm.messages import Instance, ResyncKvEvents, decode
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.request_plane.client import Plane
from dynamo_trtllm.request_plane.transport import Unsubscribe
from dynamo_trtllm.router.prefix_index import KnownPrefixes
from dynamo_trtllm.router.view import ClusterView

_log = logging.getLogger(__name__)

PAUSE_S: Final = 2.0  # after the first request for a snapshot; each one after it waits twice as long
_LONGEST_PAUSE_S = 30.0
_TIMEOUT_S = 2.0
_AT_ONCE = 8  # snapshots: one of a large cache takes tens of ms of CPU time, while streams wait
_UNANSWERED = 3  # requests, after which the worker's blocks are forgotten


@dataclass(slots=True)
class _Resync:
    """The requests to one worker for a snapshot."""

    due_s: float
    count: int = 0
    failure: str = ""
    task: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # the worker is in sync


class PrefixFeed:
    """Updates `known` from the instances of `view` and, if it reads events, from the KV events of their namespace."""

    def __init__(
        self,
        known: KnownPrefixes,
        view: ClusterView,
        plane: Plane,
        namespace: str,
        metrics: FrontendMetrics,
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._known = known
        self._metrics = metrics
        self._view = view
        self._changes = view.subscribe()
        self._plane = plane
        self._namespace = namespace
        self._pause_s = pause_s
        self._instances: dict[int, Instance] = {}
        self._resyncs: dict[int, _Resync] = {}
        self._wake = asyncio.Event()
        self._num_unreadable = 0  # messages

    async def run(self) -> None:
        """Run until cancelled."""
        unsubscribe: Unsubscribe | None = None
        if self._known.reads_events:
            unsubscribe = await self._plane.subscribe(kv_events_subject(self._namespace), self._on_message)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    changed = self._view.changed
                    self._wake.clear()
                    self._follow_instances()
                    wait_s = self._ask(group)
                    await first_of(changed.wait(), self._wake.wait(), timeout_s=wait_s)
        finally:
            if unsubscribe is not None:
                await unsubscribe()

    def _follow_instances(self) -> None:
        now = {instance.id: instance if is_added else None for instance, is_added in self._changes}
        self._changes.clear()
        for instance_id, instance in now.items():
            if instance is None:
                self._instances.pop(instance_id, None)
                self._known.remove_instance(instance_id)
            elif instance != self._instances.get(instance_id):  # not one that registered again
                self._instances[instance_id] = instance
                self._known.add_instance(instance)

    def _on_message(self, data: bytes, _reply: str) -> None:
        try:
            update = decode(data, KvCacheUpdate)
            was_unsynced = update.instance_id in self._known.unsynced
            self._known.on_update(update)
        except (BadFrame, ValueError) as exc:
            self._metrics.child("kv_updates_total", "unreadable").inc()
            self._num_unreadable += 1
            if self._num_unreadable.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th …
                _log.warning("unreadable KV events dropped (%d so far): %s", self._num_unreadable, exc)
            return
        has_gap = not was_unsynced and update.instance_id in self._known.unsynced
        self._metrics.child("kv_updates_total", "gap" if has_gap else "applied").inc()
        resync = self._resyncs.get(update.instance_id)
        if resync is not None and update.instance_id not in self._known.unsynced:
            resync.ended.set()
        elif resync is None and update.instance_id in self._known.unsynced:
            self._wake.set()

    def _ask(self, group: asyncio.TaskGroup) -> float | None:
        """Start the requests for snapshots that are due. Return the seconds until the next one is due."""
        now, unsynced = asyncio.get_running_loop().time(), self._known.unsynced
        for instance_id in self._resyncs.keys() - unsynced:
            del self._resyncs[instance_id]
        for instance_id in unsynced - self._resyncs.keys():
            self._resyncs[instance_id] = _Resync(now)
        waiting = [(name, each) for name, each in self._resyncs.items() if each.task is None]
        due = [(name, each) for name, each in waiting if each.due_s <= now]
        for name, resync in due[: _AT_ONCE - (len(self._resyncs) - len(waiting))]:
            resync.task = group.create_task(self._request(self._instances[name], resync), name=f"kv-resync-{name:x}")
        return min((max(each.due_s - now, self._pause_s / 8) for _, each in waiting), default=None)

    async def _request(self, instance: Instance, resync: _Resync) -> None:
        if resync.count == _UNANSWERED:
            reason = resync.failure or "it accepts requests but publishes nothing"
            _log.warning(
                "worker %x did not send its prefix cache, asked %d times: %s", instance.id, _UNANSWERED, reason
            )
            if instance.id in self._known.unsynced:
                self._known.forget(instance.id)
        resync.failure = ""
        self._metrics.child("kv_updates_total", "resync").inc()
        try:
            await self._plane.control(instance.subject, ResyncKvEvents(), timeout_s=_TIMEOUT_S)
            async with asyncio.timeout(min(_TIMEOUT_S, self._pause_s)):
                await resync.ended.wait()
        except DynamoError as exc:
            resync.failure = f"{exc.code}: {exc.message}"
        except TimeoutError:
            pass  # the snapshot may come later
        pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2**resync.count)
        resync.count, resync.due_s = resync.count + 1, asyncio.get_running_loop().time() + pause_s
        resync.task = None
        self._wake.set()
