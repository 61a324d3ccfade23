"""When a peer counts as gone: it did not answer, though this process was there to hear it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from dynamo_trtllm.background import BackgroundTasks
from dynamo_trtllm.errors import DynamoError, Unreachable
from dynamo_trtllm.plane.inproc import InprocLink
from dynamo_trtllm.plane.link import Heartbeat

INTERVAL_S = 5.0


class Clock:
    """The loop's own, which a test may put on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.ahead_s = 0.0
        time: Callable[[], float] = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + self.ahead_s)


class Silent(InprocLink):
    """Answers nothing; each question takes as long as is listed, and the one after them is answered."""

    def __init__(self, clock: Clock, taking_s: Sequence[float]) -> None:
        super().__init__()
        self._clock = clock
        self._taking_s = list(taking_s)

    async def ask(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        if not self._taking_s:
            return data
        self._clock.ahead_s += self._taking_s.pop(0)
        raise Unreachable(f"no answer from {subject}")


@pytest.mark.parametrize(
    ("taking_s", "is_lost"),
    [
        ([], False),
        ([0.0], True),  # nobody listens
        ([INTERVAL_S], True),
        ([20.0], False),  # this process stood still for 15 s
        ([20.0, INTERVAL_S], True),
        ([20.0, 20.0], True),  # not for ever
    ],
    ids=str,
)
async def test_ping_when_no_answer_came_then_lost_unless_this_process_stood_still(
    monkeypatch: pytest.MonkeyPatch, taking_s: Sequence[float], is_lost: bool
) -> None:
    lost: list[tuple[str, DynamoError]] = []
    heartbeat = Heartbeat(
        Silent(Clock(monkeypatch), taking_s),
        INTERVAL_S,
        message=lambda _: b"",
        tasks=BackgroundTasks(),
        lost=lambda *what: lost.append(what),
    )
    await heartbeat._ask("p")
    assert [peer for peer, _ in lost] == ["p"] * is_lost
