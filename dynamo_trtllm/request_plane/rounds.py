"""Distributes received frames to their streams, with a bound per event-loop iteration. No socket, no clock.

A new request needs a few dozen iterations. Without a bound, an iteration of an overloaded process would handle
everything that has arrived. The rest waits here, not in NATS, where the acknowledgement of a new request would wait
behind it and time out. Waiting frames of a stream are merged into one chunk.
"""

from __future__ import annotations

import asyncio
from collections import deque

from dynamo_trtllm.request_plane.frames import Batch, Frame, StreamBuffer, StreamDemux

CHUNKS_PER_TURN = 1024  # 5 to 10 ms of work in a frontend


class Rounds:
    """Feeds an inbox: batches at once while the loop keeps up, otherwise stream by stream in the order in which they
    began to wait.

    The first frame of a stream never waits: with it a request goes on, or its answer begins.
    """

    def __init__(self, inbox: StreamDemux) -> None:
        self._inbox = inbox
        self._behind: deque[StreamBuffer] = deque()  # those that have frames waiting, each once
        self._chunks_left = CHUNKS_PER_TURN
        self._is_turn_due = False

    def feed(self, batch: Batch) -> None:
        """Give the streams their frames, now or in the turns of the loop that follow."""
        if self._is_turn_due:
            self._put_by(batch.frames)
            return
        left, self._chunks_left = self._chunks_left, self._chunks_left - len(batch.frames)
        if self._chunks_left >= 0:
            self._inbox.feed(batch)
        else:
            self._inbox.feed(Batch(batch.frames[:left]))
            self._put_by(batch.frames[left:])
        if self._chunks_left <= 0:  # in however many turns it was: none has had more
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
        behind, self._chunks_left = self._behind, CHUNKS_PER_TURN
        while behind and self._chunks_left > 0:
            self._chunks_left -= behind.popleft().catch_up()
        self._is_turn_due = False
        if behind or self._chunks_left <= 0:
            self._turn_soon()
