"""Log lines of which one fault can cause thousands."""

from __future__ import annotations

import asyncio

from dynamo_trtllm.observability.line_limit import LineLimit


async def test_lines_over_limit_are_counted_at_the_end() -> None:
    reported: asyncio.Queue[int] = asyncio.Queue()
    limit = LineLimit(most=2, period_s=0.01, report=reported.put_nowait)
    assert [limit.admits() for _ in range(5)] == [True, True, False, False, False]
    assert await reported.get() == 3
    assert limit.admits(), "a new period has begun"


async def test_lines_when_there_are_few_then_nothing_is_reported() -> None:
    reported: list[int] = []
    limit = LineLimit(most=2, period_s=60, report=reported.append)
    assert limit.admits()
    limit._end_period()
    assert reported == []
