"""Sends control verbs of the pipeline to workers in the background, and again while a worker is unreachable."""

from __future__ import annotations

import asyncio
import logging

from dynamo_trtllm.errors import Disconnected, DynamoError, Unreachable
from dynamo_trtllm.messages import Instance, KvTransferParams, ReleaseKv, ReleaseOutcome, ReleaseSlot
from dynamo_trtllm.request_plane.base import Plane

_log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_PAUSES_S = (0.2, 0.5, 1.0)  # between tries; what comes too late expires at the worker


class BackgroundControl:
    """Owns the tasks that carry them; close it after the last stream."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, holder: Instance, ticket: KvTransferParams, outcome: ReleaseOutcome) -> None:
        self._post(holder, ReleaseKv(ticket.ticket_id, outcome), f"ticket {ticket.ticket_id} was not released")

    def release_slot(self, decode: Instance, slot: str | None) -> None:
        if slot is not None:
            self._post(decode, ReleaseSlot(slot), f"decode slot {slot} was not given back")

    def _post(self, instance: Instance, command: ReleaseKv | ReleaseSlot, error_text: str) -> None:
        """Posts and returns: it also runs while a cancelled stream is closed, where nothing may be awaited."""
        task = asyncio.get_running_loop().create_task(self._send(instance, command, error_text))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("control request to a worker failed unexpectedly", exc_info=error)

    async def _send(self, instance: Instance, command: ReleaseKv | ReleaseSlot, error_text: str) -> None:
        for pause_s in (*_PAUSES_S, None):
            try:
                await self._plane.control(instance.subject, command, timeout_s=_TIMEOUT_S)
                return
            except DynamoError as exc:
                if pause_s is None or not isinstance(exc, Disconnected | Unreachable):
                    # a worker that has ended holds nothing
                    level = logging.INFO if isinstance(exc, Unreachable) else logging.WARNING
                    _log.log(level, "%s (%s): %s", error_text, exc.code, exc.message)
                    return
            await asyncio.sleep(pause_s)

    async def aclose(self) -> None:
        """Waits a bounded time for the verbs under way."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=_TIMEOUT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
