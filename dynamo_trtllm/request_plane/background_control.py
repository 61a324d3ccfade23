"""Send the pipeline's control requests to workers in the background, with retries while a worker is unreachable."""

from __future__ import annotations

import asyncio
import logging

from dynamo_trtllm.errors import Disconnected, DynamoError, Unreachable
from dynamo_trtllm.messages import Instance, KvTransferParams, ReleaseKv, ReleaseOutcome, ReleaseSlot
from dynamo_trtllm.request_plane.base import Plane

_log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_PAUSES_S = (0.2, 0.5, 1.0)  # between attempts; if all fail, the worker frees the resource when it expires


class BackgroundControl:
    """A sender of control requests, which owns their tasks. Close it after the last stream."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, prefill: Instance, params: KvTransferParams, outcome: ReleaseOutcome) -> None:
        """Let the prefill worker free the KV of a transfer."""
        transfer_id = params.transfer_id
        self._post(prefill, ReleaseKv(transfer_id, outcome), f"KV of transfer {transfer_id} was not released")

    def release_slot(self, decode: Instance, slot: str | None) -> None:
        """Free a reserved decode slot, if there is one."""
        if slot is not None:
            self._post(decode, ReleaseSlot(slot), f"decode slot {slot} was not released")

    def _post(self, instance: Instance, command: ReleaseKv | ReleaseSlot, error_text: str) -> None:
        """Start sending and return at once: callers may be closing a cancelled stream, where they must not await."""
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
                    # A worker that has exited has freed everything.
                    level = logging.INFO if isinstance(exc, Unreachable) else logging.WARNING
                    _log.log(level, "%s (%s): %s", error_text, exc.code, exc.message)
                    return
            await asyncio.sleep(pause_s)

    async def aclose(self) -> None:
        """Wait a bounded time for the requests in progress, then cancel them."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=_TIMEOUT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
