"""What tests of the frontend's limits share: a clock, and tasks that wait."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from dynamo_trtllm.frontend.requests.concurrency_limiter import ConcurrencyLimiter
from dynamo_trtllm.frontend.requests.fair_queue import Claim
from dynamo_trtllm.frontend.requests.token_counters import Client, CountedRequest
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.start_window import RequestPlaces, StartWindow
from dynamo_trtllm.frontend.routing.worker_capacity import FREE as FREE_OF_COST
from dynamo_trtllm.protocol.messages import ClientShare


class FreePlaces(RequestPlaces):
    """Places that are always free."""

    def may_begin(self, share: ClientShare) -> bool:
        return True

    def begin(self, share: ClientShare) -> None: ...

    def close(self) -> None: ...


FREE: Final = FreePlaces(StartWindow("m", ClusterView(), lambda: None), FREE_OF_COST, 1, 1)


async def acquire(
    limiter: ConcurrencyLimiter,
    count: int,
    client: str | Client,
    within_s: float = 30.0,
    places: RequestPlaces = FREE,
    **more: int,
) -> CountedRequest:
    """Take the permits of a request, of which each choice has a prompt of one token.

    `more`: other fields of its claim.
    """
    claim = Claim(
        client=Client(client) if isinstance(client, str) else client,
        num_choices=count,
        places=places,
        **{"prompt_tokens": count, **more},
    )
    return await limiter.acquire(claim, within_s, lambda: 0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def wait_until_loaded() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def left(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
