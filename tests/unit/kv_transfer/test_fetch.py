"""The waits of a NIXL fetch, without NIXL."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from dynamo_trtllm.kv_transfer.base import Destination, MemoryRegion
from dynamo_trtllm.kv_transfer.nixl.fetch import Fetch

CONNECT_S = 0.05


@contextlib.contextmanager
def slowly_connected(_offer: Any) -> Iterator[Any]:
    time.sleep(CONNECT_S)
    yield SimpleNamespace(name="prefill", broken=False)


def test_steps_when_the_connection_takes_long_then_the_wait_for_the_first_region_begins_after_it() -> None:
    bindings, peers, offer = MagicMock(), MagicMock(), MagicMock(ready=1, kind="DRAM")
    bindings.translated.return_value = contextlib.nullcontext()
    bindings.agent.transfer.return_value = bindings.agent.check_xfer_state.return_value = "PROC"
    peers.connected = slowly_connected
    to = Destination([MemoryRegion(4096, 8)])
    own = bindings, peers, MagicMock(), MagicMock()
    fetch = Fetch(*own, "t-1", offer, to, slot=0, deadline=time.monotonic() + 60, is_checked=False)
    assert next(fetch.steps()) < CONNECT_S
