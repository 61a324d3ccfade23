"""The waits of a NIXL fetch, without NIXL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.kv_transfer.nixl import fetch
from dynamo_trtllm.kv_transfer.nixl.fetch import Fetch
from dynamo_trtllm.kv_transfer.transfer_backend import Destination

CONNECT_S = 7.0


class Clock:
    """A clock that stands still until the test moves it, so that a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fetch, "time", clock)
    return clock


def test_steps_time_first_region_after_the_connection(clock: Clock) -> None:
    @contextlib.contextmanager
    def slowly_connected(_offer: Any) -> Iterator[Any]:
        clock.now += CONNECT_S
        yield SimpleNamespace(name="prefill", broken=False)

    bindings = MagicMock()
    peers = MagicMock(connected=slowly_connected, is_full=lambda offer: False)
    bindings.translated.return_value = contextlib.nullcontext()
    bindings.agent.transfer.return_value = "PROC"
    bindings.agent.check_xfer_state.return_value = "PROC"
    offer = MagicMock(ready=1, kind="DRAM")
    to = Destination([MemoryRegion(4096, 8)])
    deadline = clock.now + 60
    steps = Fetch(
        bindings, peers, MagicMock(), MagicMock(), "t-1", offer, to, 0, deadline, is_checked=False
    ).steps()

    assert next(steps) == 0
    clock.now += 2
    assert next(steps) == 2
