"""The order in which a caller gives streams what has arrived for them. No socket, no clock.

A request that begins needs a few dozen turns of the loop. In a process that gets more frames than it can deal with,
each turn would last as long as all that has arrived takes. So a turn has a bound. What is left over waits here and not
in the server: there, a worker's answer to a new request would wait behind it until the request is given up. What waits
for one stream becomes one chunk, so that a process that is behind has less work for each token.
"""

from __future__ import annotations

import asyncio
from collections import deque

from dynamo_trtllm.plane.stream import Arrivals, Batch, Frame, Inbox

CHUNKS_PER_TURN = 1024  # 5 to 10 ms of work in a frontend


class Rounds:
    """Feeds an inbox: each batch as it comes while the loop keeps up, else streams in the order in which they wait.

    The first frame of a stream never waits: with it a request goes on, or its answer begins.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._behind: deque[Arrivals] = deque()  # those that have frames waiting, each once
        self._left = CHUNKS_PER_TURN
        self._is_turn_due = False

    def feed(self, batch: Batch) -> None:
        """Give the streams their frames, now or in the turns of the loop that follow."""
        if self._is_turn_due:
            self._put_by(batch.frames)
            return
        left, self._left = self._left, self._left - len(batch.frames)
        if self._left >= 0:
            self._inbox.feed(batch)
        else:
            self._inbox.feed(Batch(batch.frames[:left]))
            self._put_by(batch.frames[left:])
        if self._left <= 0:  # in however many turns it was: none has had more
            self._turn_soon()

    def _put_by(self, frames: list[Frame]) -> None:
        find = self._inbox.find
        for frame in frames:
            arrivals = find(frame.stream)
            if arrivals is None:
                continue
            waiting = arrivals.waiting
            if not waiting:
                if frame.number == 0:
                    arrivals.feed(frame)
                    continue
                self._behind.append(arrivals)
            waiting.append(frame)

    def _turn_soon(self) -> None:
        self._is_turn_due = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        behind, self._left = self._behind, CHUNKS_PER_TURN
        while behind and self._left > 0:
            self._left -= behind.popleft().catch_up()
        self._is_turn_due = False
        if behind or self._left <= 0:
            self._turn_soon()
