"""Waiting takes no time, and a wait for nothing is an error."""

from __future__ import annotations

import asyncio
import time

import pytest

from dynamo_trtllm.protocol.errors import InternalError
from dynamo_trtllm.simulate.virtual_time import run_virtual, virtual_clocks


def test_an_hour_passes_at_once() -> None:
    async def wait() -> tuple[float, float]:
        clocks = virtual_clocks()
        before_s = clocks.epoch()
        await asyncio.sleep(3600)
        return clocks.monotonic(), clocks.epoch() - before_s

    begun_s = time.monotonic()
    assert run_virtual(wait()) == (3600.0, 3600.0)
    assert time.monotonic() - begun_s < 600


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def wait() -> list[tuple[str, float]]:
        fired: list[tuple[str, float]] = []
        clock = virtual_clocks().monotonic

        async def fire(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            fired.append((name, clock()))

        await asyncio.gather(fire("late", 2.0), fire("early", 1.0), fire("late too", 2.0))
        return fired

    assert run_virtual(wait()) == [("early", 1.0), ("late", 2.0), ("late too", 2.0)]


def test_a_wait_that_nothing_ends_is_an_error() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(InternalError, match="never happens"):
        run_virtual(wait())
