"""What tests of the frontend's limits share: a clock, and tasks that wait."""

from __future__ import annotations

import asyncio
from typing import Final

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.start_window import RequestPlaces, StartWindow


class FreePlaces(RequestPlaces):
    """Places that are always free."""

    def may_begin(self) -> bool:
        return True

    def begin(self) -> None: ...

    def close(self) -> None: ...


FREE: Final = FreePlaces(StartWindow("m", ClusterView(), 1, lambda: None), 0, 1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def wait_until_loaded() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def left(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
