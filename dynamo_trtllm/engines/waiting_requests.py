"""Order the requests of the mock and the torch engine: by priority, then by the shares of their
clients, then by arrival. No request waits for ever.

A prompt of a client below its share also goes before the rest of prompts that have begun.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeVar

from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.protocol.messages import ClientShare, GenerateRequest


class QueueOrder(NamedTuple):
    """The place of a request in the queue. Lower values come first."""

    priority: float
    group: int  # 0: requests of clients below their share; 1: all other requests


FIRST: Final = QueueOrder(-math.inf, 0)  # no other request may overtake it
# Requests of a low priority could wait for ever behind those of a high priority. So a request that
# has waited for this time goes first. The time is longer than the waits that a priority is to
# avoid, and shorter than the time for which clients wait (minutes).
MAX_WAIT_S: Final = 30.0
# A step is divided into this many short steps, so that a client below its share waits less for the
# step that runs. With 3 short steps in place of a step of 0.1 s, the p99 of the time of the
# client's prompts is 23 ms longer than without other clients. With 2, it would be 37 ms longer, and
# the throughput 0.6% higher (docs/performance.md, "Shares of clients").
_SHORT_STEPS: Final = 3
_EVENT_OF_WAIT: Final = {
    "kv_blocks": RecordedEvent.WAITING_FOR_KV_BLOCKS,
    "transfer_buffer": RecordedEvent.WAITING_FOR_BUFFER,
}


class WaitingRequest(Protocol):
    """A request in the queue of an engine."""

    request: GenerateRequest
    queued_s: float
    """When the request was queued, in seconds of a monotonic clock."""
    is_overdue: bool
    """Whether the request has waited for MAX_WAIT_S. Then its order is FIRST."""
    recorded_wait: str
    """The resource that `record_wait` has recorded last; "" before."""

    @property
    def queue_order(self) -> QueueOrder:
        """Return its place in the queue."""


R = TypeVar("R", bound=WaitingRequest)


def queue_order(request: GenerateRequest) -> QueueOrder:
    """Return the place of a request that has not waited for long."""
    group = 0 if request.client_share is ClientShare.BELOW else 1
    return QueueOrder(request.priority, group)


def step_limit(most: int, prompt: GenerateRequest) -> int:
    """Return how many prompt tokens a step may have, if some of them are of a certain prompt.

    The number is a third of `most` if the client of the prompt is above its share. A client is
    above its share only while another client is below its own. A prompt of that other client should
    not wait for a long step: this prompt may come while the step runs, or be in the step itself.

    Args:
        most: how many prompt tokens a step may have otherwise.
        prompt: the certain prompt.
    """
    if prompt.client_share is ClientShare.ABOVE:
        return max(1, most // _SHORT_STEPS)
    return most


def group_of(request: WaitingRequest) -> int:
    """Return the group of a request, by which the prompts that have begun are sorted."""
    return request.queue_order.group


def enqueue(waiting: deque[R], request: R, clock: Callable[[], float] = time.monotonic) -> None:
    """Queue a request behind those of the same order."""
    request.queued_s = clock()
    insort(waiting, request, key=_order)


def promote_overdue(waiting: deque[R], clock: Callable[[], float] = time.monotonic) -> None:
    """Move the request that has waited longest to the front, if it has waited for MAX_WAIT_S.

    A request of order FIRST keeps its place.
    """
    if not waiting:
        return
    first_order = waiting[0].queue_order
    # If all requests have the same order, the oldest one is at the front already.
    if first_order == FIRST or first_order == waiting[-1].queue_order:
        return
    oldest = min(waiting, key=_queued_s)
    if clock() - oldest.queued_s >= MAX_WAIT_S:
        waiting.remove(oldest)
        oldest.is_overdue = True
        waiting.appendleft(oldest)


def record_wait(first: WaitingRequest, resource: str) -> None:
    """Record, once, the resource that the first request of the queue waits for."""
    event = _EVENT_OF_WAIT.get(resource)
    if event is not None and resource != first.recorded_wait:
        first.recorded_wait = resource
        RECORDER.record(first.request.request_id, event)


def _order(request: WaitingRequest) -> QueueOrder:
    return request.queue_order


def _queued_s(request: WaitingRequest) -> float:
    return request.queued_s
