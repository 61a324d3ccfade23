"""Order the requests that wait in the mock and the torch engine: by priority and arrival, but none
waits for ever.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from typing import Final, Protocol, TypeVar

from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol.messages import GenerateRequest

FIRST: Final = -math.inf  # order of a request that no other one may overtake
# A client that sends only requests of a high priority could keep those of all others waiting. After
# this time, they go first. It is longer than what a priority is for, and shorter than the time for
# which clients wait (minutes).
MAX_WAIT_S: Final = 30.0
_EVENT_OF_WAIT: Final = {
    "kv_blocks": RecordedEvent.WAITING_FOR_KV_BLOCKS,
    "transfer_buffer": RecordedEvent.WAITING_FOR_BUFFER,
}


class WaitingRequest(Protocol):
    """A request in the queue of an engine."""

    request: GenerateRequest
    queued_s: float
    """When it was queued, in seconds of `time.monotonic`."""
    is_overdue: bool
    """Whether it has waited for MAX_WAIT_S. Then its order is FIRST."""
    recorded_wait: str
    """The resource that `record_wait` has recorded last; "" before."""

    @property
    def queue_order(self) -> float:
        """Return its place in the queue: lower values first."""


R = TypeVar("R", bound=WaitingRequest)


def enqueue(waiting: deque[R], request: R) -> None:
    """Queue a request behind those of the same order."""
    request.queued_s = time.monotonic()
    insort(waiting, request, key=_order)


def promote_overdue(waiting: deque[R]) -> None:
    """Move the request that has waited longest to the front, if it has waited for MAX_WAIT_S.

    A request of order FIRST keeps its place.
    """
    if not waiting:
        return
    first_order = waiting[0].queue_order
    # If all have the same order, the oldest is at the front already.
    if first_order == FIRST or first_order == waiting[-1].queue_order:
        return
    oldest = min(waiting, key=_queued_s)
    if time.monotonic() - oldest.queued_s >= MAX_WAIT_S:
        waiting.remove(oldest)
        oldest.is_overdue = True
        waiting.appendleft(oldest)


def record_wait(first: WaitingRequest, resource: str) -> None:
    """Record, once, the resource that the first request of the queue waits for."""
    event = _EVENT_OF_WAIT.get(resource)
    if event is not None and resource != first.recorded_wait:
        first.recorded_wait = resource
        RECORDER.record(first.request.request_id, event)


def _order(request: WaitingRequest) -> float:
    return request.queue_order


def _queued_s(request: WaitingRequest) -> float:
    return request.queued_s
