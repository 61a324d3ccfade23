"""Pauses between messages that arrive together over NATS."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from dynamo_trtllm.cluster.request_plane import nats
from dynamo_trtllm.cluster.request_plane.nats import NatsTransport

NUM_MESSAGES = 20


class FakeSubscription:
    """A subscription that takes all its messages without a pause, as nats-py does."""

    def __init__(self, take: Callable[[Msg], Awaitable[None]]) -> None:
        self._take = take
        self.pending_msgs = 0

    async def deliver(self, count: int) -> None:
        self.pending_msgs = count
        while self.pending_msgs:
            self.pending_msgs -= 1
            await self._take(Msg(Client(), data=b"x"))


@pytest.mark.parametrize(
    ("limit_s", "caught_up_after"),
    [(60.0, [NUM_MESSAGES]), (0.0, list(range(1, NUM_MESSAGES + 1)))],
    ids=["in-time", "over-time"],
)
async def test_long_messages_let_other_work_have_its_turn(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, caught_up_after: list[int]
) -> None:
    monkeypatch.setattr(nats, "RECEIVING_S", limit_s)
    transport = NatsTransport("nats://127.0.0.1:1")
    subscriptions: list[FakeSubscription] = []

    async def subscribe(
        _: str, cb: Callable[[Msg], Awaitable[None]], **__: object
    ) -> FakeSubscription:
        subscriptions.append(FakeSubscription(cb))
        return subscriptions[0]

    monkeypatch.setattr(transport._client, "subscribe", subscribe)
    received: list[bytes] = []
    caught_up: list[int] = []
    await transport.subscribe(
        "inbox", lambda data, _: received.append(data), lambda: caught_up.append(len(received))
    )
    seen_by_others: list[int] = []

    async def do_other_work() -> None:
        while len(received) < NUM_MESSAGES:
            seen_by_others.append(len(received))
            await asyncio.sleep(0)

    await asyncio.gather(subscriptions[0].deliver(NUM_MESSAGES), do_other_work())
    assert caught_up == caught_up_after
    assert len(seen_by_others) == len(caught_up_after) - 1
