"""Send control requests to workers in the background."""

from __future__ import annotations

import asyncio
import logging

from dynamo_trtllm.cluster.request_plane.client import PlaneClient
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import Instance, ReleaseKv, ReleaseSlot
from dynamo_trtllm.support.background import cancel_all

log = logging.getLogger(__name__)

_CONTROL_TIMEOUT_S = 5.0  # longest wait for the reply to one control request
# The pauses between attempts. If all attempts fail, the worker frees the resource when it expires.
_PAUSES_S = (0.2, 0.5, 1.0)
_CLOSE_TIMEOUT_S = 5.0  # longest wait of `aclose` for the requests in progress


class BackgroundControl:
    """Sends control requests in background tasks. Close it after the last stream."""

    def __init__(self, plane: PlaneClient) -> None:
        self._plane = plane
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, worker: Instance, message: ReleaseKv | ReleaseSlot) -> None:
        """Start sending a request, and return at once.

        Callers can't wait: a stream may call this while it is being cancelled.
        """
        task = asyncio.get_running_loop().create_task(self._send(worker, message))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            log.error("control request to a worker failed unexpectedly", exc_info=error)

    async def _send(self, worker: Instance, message: ReleaseKv | ReleaseSlot) -> None:
        """Send a request, and repeat it while the worker can't be reached."""
        for pause_s in (*_PAUSES_S, None):  # None: no attempt follows
            try:
                await self._plane.control(worker.subject, message, timeout_s=_CONTROL_TIMEOUT_S)
                return
            except DynamoError as exc:
                may_succeed = isinstance(exc, errors.Disconnected | errors.Unreachable)
                if pause_s is None or not may_succeed:
                    # Unreachable: the worker has probably exited, which has freed its resources.
                    level = logging.INFO if isinstance(exc, errors.Unreachable) else logging.WARNING
                    text = "worker %x did not get %s (%s): %s"
                    log.log(level, text, worker.id, message, exc.code, exc.message)
                    return
            await asyncio.sleep(pause_s)

    async def aclose(self) -> None:
        """Wait for the requests in progress, and cancel those that take too long."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
        await cancel_all(late)
