"""When a peer counts as gone: two questions were not answered, and nothing else came from it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dynamo_trtllm.cluster.request_plane.inproc import InprocTransport
from dynamo_trtllm.cluster.request_plane.transport import Heartbeat
from dynamo_trtllm.protocol.errors import Disconnected, DynamoError, PlaneError, Unreachable
from dynamo_trtllm.support.background import BackgroundTasks

SILENT = Unreachable("no answer")
OWN_LOSS = Disconnected("no connection here")


class Failing(InprocTransport):
    """A transport that fails the first questions as listed, and answers the next ones.

    `heard` grows with each failure, when it is to.
    """

    def __init__(self, failures: Sequence[PlaneError], sends_something_else: bool) -> None:
        super().__init__()
        self._failures = list(failures)
        self._sends = sends_something_else
        self.asked = self.heard = 0

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        self.asked += 1
        if not self._failures:
            return data
        self.heard += self._sends
        raise self._failures.pop(0)


@pytest.mark.parametrize(
    ("failures", "sends_something_else", "asked", "is_lost"),
    [
        ([], False, 1, False),
        ([SILENT], False, 2, False),  # one message was lost, or this process stood still
        ([SILENT, SILENT], False, 2, True),
        ([SILENT, SILENT], True, 1, False),  # its frames keep arriving
        ([OWN_LOSS], False, 1, True),
    ],
)
async def test_peer_silent_for_two_pings_is_lost(
    failures: Sequence[PlaneError], sends_something_else: bool, asked: int, is_lost: bool
) -> None:
    lost: list[tuple[str, DynamoError]] = []
    transport = Failing(failures, sends_something_else)
    heartbeat = Heartbeat(
        transport=transport,
        interval_s=5.0,
        peers=lambda: ["p"],
        message=lambda _: b"",
        heard=lambda _: transport.heard,
        on_peer_lost=lambda *what: lost.append(what),
        tasks=BackgroundTasks(),
    )
    await heartbeat._ask("p")
    assert transport.asked == asked
    assert [peer for peer, _ in lost] == ["p"] * is_lost
