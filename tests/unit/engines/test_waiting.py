"""The order of waiting requests, without an engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_trtllm.engines import waiting_requests as waiting
from dynamo_trtllm.engines.waiting_requests import (
    FIRST,
    QueueOrder,
    enqueue,
    promote_overdue,
    record_wait,
)
from dynamo_trtllm.observability.recorder import RecordedEvent


@dataclass
class Request:
    name: str
    priority: float
    group: int = 1
    queued_s: float = 0.0
    is_overdue: bool = False

    @property
    def queue_order(self) -> QueueOrder:
        return FIRST if self.is_overdue else QueueOrder(self.priority, self.group)


def test_overdue_request_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAIT_S", 0.0)
    queue: deque[Request] = deque()
    enqueue(queue, Request("low", 5))
    enqueue(queue, Request("holds memory", FIRST.priority, FIRST.group))
    promote_overdue(queue)
    assert [request.name for request in queue] == ["holds memory", "low"]


def test_overdue_request_when_others_arrive_then_it_stays_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "MAX_WAIT_S", 0.0)
    queue: deque[Request] = deque()
    for name, priority in (("low", 5), ("high", -5)):
        enqueue(queue, Request(name, priority))
    promote_overdue(queue)
    enqueue(queue, Request("highest", -9))
    promote_overdue(queue)
    assert [request.name for request in queue] == ["low", "highest", "high"]


def test_wait_records_each_resource_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []
    recorder = SimpleNamespace(record=lambda *event: recorded.append(event))
    monkeypatch.setattr(waiting, "RECORDER", recorder)
    first: Any = SimpleNamespace(request=SimpleNamespace(request_id="r"), recorded_wait="")
    for resource in ("slots", "transfer_buffer", "slots", "transfer_buffer", "kv_blocks"):
        record_wait(first, resource)
    assert recorded == [
        ("r", RecordedEvent.WAITING_FOR_BUFFER),
        ("r", RecordedEvent.WAITING_FOR_KV_BLOCKS),
    ]
