"""Check the numbers of received frames, and pass the frames to the streams of a caller.

Tokens of a stream that arrive together are merged. The module does no I/O.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dynamo_trtllm.cluster.request_plane.frames import Frame
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import Chunk, TokenIds, TokenLogprob, token_ids
from dynamo_trtllm.protocol.streams import TOKEN_CHUNKS, OnEvent, StreamEvent, TaskStream

# Time for which an iteration of the event loop passes frames on. In a frontend, a frame takes 5 to
# 10 µs, and 100 to 300 µs if it is the first or the last one of its stream.
PASSING_S = 0.004
# Frames between two looks at the clock. If all of them are the first ones of streams, they take
# about as long as PASSING_S.
FRAMES_PER_CHECK = 16
# Frames are merged only if at least this many arrive together. Fewer are passed on in half a
# millisecond.
MERGED_FRAMES = 64
# Frames are merged only if at least this many arrive together per open stream. Fewer do not show
# that this process is behind: it may have been busy for a moment.
MERGED_PER_STREAM = 4


class SendCancel(Protocol):
    """Cancels the call of a stream at its worker."""

    def __call__(self, *, awaits_kv: bool) -> None: ...


def _nothing() -> None: ...


class StreamReceiver(TaskStream):
    """The caller's side of one stream: checks frame numbers and passes the chunks on as events.

    Args:
        on_event: receives the events.
        tasks: running tasks of the owner; the task that opens the stream is one.
        on_end: called once.
        send_cancel: tells the worker to cancel the call. With `awaits_kv`, the worker still sends
            the terminal chunk, which describes the KV of a prefill call.
    """

    __slots__ = ("_next_number", "_on_end", "_send_cancel", "last_ping_before_ack", "waiting")

    continues_after_task = True

    def __init__(
        self,
        on_event: OnEvent,
        tasks: set[asyncio.Task[None]],
        on_end: Callable[[], None],
        send_cancel: SendCancel,
    ) -> None:
        super().__init__(on_event, tasks)
        self._on_end = on_end
        self._send_cancel = send_cancel
        self._next_number = 0
        # The number of the last ping before this stream was acknowledged; 0: there was none. Pings
        # are numbered over all workers. None: it is not acknowledged.
        self.last_ping_before_ack: int | None = None
        self.waiting: list[Frame] = []  # received, not yet fed

    @property
    def is_acknowledged(self) -> bool:
        """Return True if the worker has confirmed that it received the call."""
        return self.last_ping_before_ack is not None

    @property
    def num_received(self) -> int:
        """Return the number of frames received, including waiting ones."""
        return self._next_number + len(self.waiting)

    def catch_up(self) -> None:
        """Feed the waiting frames. Consecutive ones that have only tokens become one.

        The loop runs once per token while this process is behind.
        """
        frames = self.waiting
        self.waiting = []
        ids = token_ids()
        logprobs: list[TokenLogprob] = []
        number = self._next_number
        for frame in frames:
            chunk = frame.chunk
            if frame.number == number and frame.failure is None:
                if isinstance(chunk, int):
                    ids.append(chunk)
                    number += 1
                    continue
                if chunk is not None and chunk.is_plain:
                    ids.extend(chunk.token_ids)
                    logprobs += chunk.logprobs
                    number += 1
                    continue
            self._feed_merged(number, ids, logprobs)
            ids = token_ids()
            logprobs = []
            self.feed(frame)
            number = self._next_number
        self._feed_merged(number, ids, logprobs)

    def _feed_merged(
        self, next_number: int, ids: TokenIds, logprobs: Sequence[TokenLogprob]
    ) -> None:
        """Feed the tokens of the frames before `next_number`, if there are any."""
        if next_number == self._next_number:
            return
        # The merged frame has the number of the last of its frames, so let `feed` expect this one.
        number = next_number - 1
        self._next_number = number
        chunk = Chunk(token_ids=ids, logprobs=tuple(logprobs))
        self.feed(Frame(stream=0, number=number, chunk=chunk))  # `feed` does not read the stream

    def feed(self, frame: Frame) -> None:
        """Check a frame and pass its chunk on. Ignore repeated frames and frames after the end."""
        on_event = self._on_event
        number = frame.number
        chunk = frame.chunk
        # Nearly all frames are the next token of a running stream.
        if (
            number == self._next_number
            and isinstance(chunk, int)
            and frame.failure is None
            and on_event is not None
        ):
            self._next_number = number + 1
            on_event(TOKEN_CHUNKS[chunk])
            return
        if on_event is None or number < self._next_number:
            return
        if number > self._next_number:
            self.emit(
                errors.StreamIncomplete(
                    f"frame {number} arrived instead of frame {self._next_number}"
                )
            )
        elif frame.failure is not None:
            self.emit(frame.failure.error())
        elif isinstance(chunk, Chunk):
            self._next_number = number + 1
            # `emit` would do the same, but this saves a function call for each chunk.
            if chunk.finish_reason is None:
                on_event(chunk)
            else:
                self.emit(chunk)
        else:
            self.emit(errors.StreamIncomplete(f"frame {number} is empty"))

    def compare_with_worker(self, ping: int, sent: int | None) -> None:
        """End with StreamIncomplete if the worker's reply to a ping shows that frames were lost.

        Args:
            ping: number of the ping.
            sent: number of frames that the worker has sent. None: it does not run the stream, or it
                has sent the last frame.
        """
        if self.last_ping_before_ack is None or self.last_ping_before_ack >= ping:
            return  # this ping is older than the acknowledgment: its reply may lack the stream
        if self.waiting:
            # The waiting frames are not fed here, because thousands of streams may have some. A gap
            # in their numbers is noticed when they are fed. The next reply is compared again.
            return
        if sent is None:
            self.fail(
                errors.StreamIncomplete(
                    "the worker no longer runs this stream and its last frame never arrived"
                )
            )
        elif sent != self._next_number:
            self.fail(
                errors.StreamIncomplete(
                    f"the worker sent {sent} frames and {self._next_number} arrived"
                )
            )

    def fail(self, error: DynamoError) -> None:
        """End the stream with a copy of `error`, after the frames that were received."""
        self.catch_up()
        # A copy: several streams may share the error, whose traceback would reference the frames of
        # each.
        self.emit(type(error)(error.message, field=error.field))

    def _close(self, last: StreamEvent | None) -> None:
        super()._close(last)
        on_end = self._on_end
        # Break a reference cycle: the callback refers to a timer of the client, and the timer to
        # this stream.
        self._on_end = _nothing
        on_end()
        if not isinstance(last, Chunk):
            self._send_cancel(awaits_kv=False)

    def _shutdown_error(self) -> DynamoError:
        return errors.Disconnected("the request plane is closed")

    def cancel(self) -> None:
        """See `StreamHandle.cancel`."""
        if self.has_ended and self._transfer_id:
            # The prefill worker still holds the KV of this ended call. Tell it to free the KV.
            self._transfer_id = ""
            self._send_cancel(awaits_kv=False)
        super().cancel()

    def stop(self) -> bool:
        """See `StreamHandle.stop`.

        Return False before the worker has acknowledged the call, because the worker may not have
        received it.
        """
        if self.has_ended or not self.is_acknowledged:
            return False
        self._send_cancel(awaits_kv=True)
        return True


class StreamDemux(dict[int, StreamReceiver]):
    """The open streams of one caller, by number. It passes received frames to them.

    When several frames per stream have arrived together, and many in all, the tokens of each stream
    become one chunk. This delays no token, because the client would get all of them in one write
    anyway. In one iteration of the event loop, frames are passed on for PASSING_S seconds, and
    further ones wait. Waiting streams are fed one by one, in the order in which they began to wait.
    Those whose first frame waits take turns with the others, because first frames decide the time
    to first token.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        # The frames of each message that has arrived and is not passed on yet.
        self._messages: deque[list[Frame]] = deque()
        # Each stream with waiting frames is in one of these: in `_new` if its first frame waits.
        self._new: deque[StreamReceiver] = deque()
        self._backlog: deque[StreamReceiver] = deque()
        # When the time of this iteration ends. None: there are so few frames that it has no limit.
        self._end_s: float | None = None
        self._is_scheduled = False  # the next iteration calls `_feed_waiting`

    def add(self, frames: list[Frame]) -> None:
        """Take the frames of one message, until `pass_on`."""
        self._messages.append(frames)

    def pass_on(self) -> None:
        """Pass the frames of the added messages to their streams, now or in the next iterations.

        Called when no further message has arrived.
        """
        messages = self._messages
        num_frames = sum(map(len, messages))
        is_behind = num_frames >= max(MERGED_FRAMES, MERGED_PER_STREAM * len(self))
        self._end_s = None
        if num_frames > FRAMES_PER_CHECK:
            self._begin_time()
        try:
            while messages:
                frames = messages.popleft()
                if is_behind:
                    self._defer(frames)
                else:
                    self._feed(frames)
        finally:
            if messages:  # a bug in one stream's receiver must not lose other streams' messages
                asyncio.get_running_loop().call_soon(self.pass_on)
            # A scheduled `_feed_waiting` feeds the deferred frames in the next iteration.
            if is_behind and not self._is_scheduled:
                self._feed_waiting()

    def _begin_time(self) -> None:
        """Begin the time for which this iteration passes frames on."""
        self._end_s = self._clock() + PASSING_S

    def _is_time_over(self) -> bool:
        return self._end_s is not None and self._clock() >= self._end_s

    def _feed(self, frames: list[Frame]) -> None:
        """Pass the frames of one message on while there is time, and let the rest wait."""
        rest = iter(frames)
        try:
            for _ in range(0, len(frames), FRAMES_PER_CHECK):
                # `_feed_waiting` is scheduled while frames wait. Frames behind these wait, too.
                if self._is_scheduled or self._is_time_over():
                    self._defer(rest)
                    self._schedule()
                    return
                for frame in itertools.islice(rest, FRAMES_PER_CHECK):
                    receiver = self.get(frame.stream)
                    if receiver is not None:
                        receiver.feed(frame)
        except BaseException:
            # A bug in one stream's receiver. `pass_on` continues with the rest.
            self._messages.appendleft(list(rest))
            raise

    def _defer(self, frames: Iterable[Frame]) -> None:
        """Let frames wait at their streams."""
        for frame in frames:
            receiver = self.get(frame.stream)
            if receiver is None:
                continue
            if not receiver.waiting:
                queue = self._new if frame.number == 0 else self._backlog
                queue.append(receiver)
            receiver.waiting.append(frame)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._feed_waiting)

    def _feed_waiting(self) -> None:
        """Feed the streams that wait while there is time."""
        self._is_scheduled = False
        self._begin_time()
        try:
            while self._new or self._backlog:
                for queue in (self._new, self._backlog):
                    if queue:
                        queue.popleft().catch_up()
                if self._is_time_over():
                    break
        finally:  # a bug in one stream's receiver must not stop all streams
            if self._new or self._backlog:
                self._schedule()

    def fail_all(self, error: DynamoError) -> None:
        """End all streams with `error`."""
        self.pass_on()
        for receiver in list(self.values()):
            receiver.fail(error)
