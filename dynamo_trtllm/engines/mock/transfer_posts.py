"""Begin the KV transfers of a mock engine between its steps."""

from __future__ import annotations

import asyncio
from typing import NamedTuple


class _Post(NamedTuple):
    pause_s: float  # for how long it delays the next step
    posted: asyncio.Future[None]  # done when it begins
    first_step: int  # the number of the first step before which it may begin


class TransferPosts:
    """KV transfers that begin between two steps, and delay the next one.

    So it is in engines whose thread runs the steps and posts the transfers.
    """

    def __init__(self) -> None:
        self._waiting: list[_Post] = []

    def add(self, pause_s: float, first_step: int) -> asyncio.Future[None]:
        """Add a transfer, and return what is done when it begins.

        Args:
            pause_s: for how long it delays the next step.
            first_step: the number of the first step before which it may begin.
        """
        posted = asyncio.get_running_loop().create_future()
        self._waiting.append(_Post(pause_s, posted, first_step))
        return posted

    def begin(self, step: int) -> float:
        """Begin the transfers that may begin before a step. Return for how long they delay it."""
        if not self._waiting:
            return 0.0
        begun = [post for post in self._waiting if post.first_step <= step]
        self._waiting = [post for post in self._waiting if post.first_step > step]
        pause_s = 0.0
        for post in begun:
            # A cancelled call does not wait any more, and transfers nothing.
            if not post.posted.done():
                post.posted.set_result(None)
                pause_s += post.pause_s
        return pause_s

    def has_later(self, step: int) -> bool:
        """Return whether a transfer may begin only before a later step."""
        return any(post.first_step > step for post in self._waiting)
