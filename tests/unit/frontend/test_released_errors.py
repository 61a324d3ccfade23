"""What a client sent is freed with its answer: an error refers to frames that hold it, and nothing keeps the error."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from dynamo_trtllm.background import in_thread
from dynamo_trtllm.errors import InvalidRequest
from dynamo_trtllm.frontend.http import run_until_disconnect


def refuse() -> None:
    raise InvalidRequest("wrong")


async def served() -> None:
    async def work() -> None:
        refuse()

    async def receive() -> Any:
        await asyncio.Event().wait()

    await run_until_disconnect(work(), receive, lambda: False)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("run", [served, lambda: in_thread(refuse)], ids=["until_gone", "in_thread"])
async def test_error_when_it_was_answered_then_it_is_freed_without_the_garbage_collector(
    run: Callable[[], Awaitable[None]],
) -> None:
    error: weakref.ref[BaseException] | None = None
    try:
        await run()
    except InvalidRequest as exc:
        error = weakref.ref(exc)
    await asyncio.sleep(0)
    assert error is not None
    assert error() is None
