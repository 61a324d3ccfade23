"""Runs coroutines from synchronous code, for the etcd and NATS servers of tests and benchmarks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a background event loop and return its result.

    This also works in a thread whose own event loop runs. The thread of the background loop lives
    as long as the process, because a child process ends with the thread that started it
    (`subprocesses.spawn`).
    """
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="blocking", daemon=True).start()
    return loop
