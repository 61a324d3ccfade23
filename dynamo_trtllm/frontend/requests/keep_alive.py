"""Keep the connection of a silent stream open.

Proxies and load balancers close a connection that sends nothing for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Final, TypeAlias

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.requests.answer import Answer
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.http_server.exchange import HttpResponse

COMMENT: Final = b": keep-alive\n\n"  # clients ignore lines that begin with a colon


class KeepAlive:
    """Sends a ping each time a streamed response was silent for a while.

    The response headers precede the first ping if nothing was sent before it.
    A stream has one timer, which is not set anew for each event.
    When it fires after an event, it waits for the rest of the silence.

    Args:
        seconds: longest silence.
        since_s: when the silence began, in the time of `time.monotonic`.
        headers: returns the response headers that are known now.
        ping: what is sent: an event that clients know, or a comment.
    """

    def __init__(
        self,
        response: HttpResponse,
        seconds: float,
        since_s: float,
        headers: Callable[[], Mapping[str, str]],
        ping: bytes = COMMENT,
    ) -> None:
        self._response = response
        self._seconds = seconds
        self._written_s = since_s
        self._headers = headers
        self._ping = ping
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def write(self, events: bytes) -> None:
        """Send events as `HttpResponse.write` does."""
        self._written_s = time.monotonic()
        self._response.write(events)

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        """Send events as `HttpResponse.send_events` does."""
        self._written_s = time.monotonic()
        await self._response.send_events(events, last=last)

    def stop(self) -> None:
        """Send no further pings. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        left_s = self._written_s + self._seconds - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._check)

    def _check(self) -> None:
        response = self._response
        if response.ended:
            self._timer = None
            return
        if time.monotonic() - self._written_s >= self._seconds:
            if not response.started:
                response.start_events(self._headers())
            if response.is_writable:  # otherwise the client has not read what was sent before
                response.write(self._ping)
            self._written_s = time.monotonic()
        self._wait()


EventSender: TypeAlias = HttpResponse | KeepAlive
"""What sends the events of a response, with or without pings."""


@contextmanager
def keep_alive(
    answer: Answer,
    response: HttpResponse,
    timeline: RequestTimeline,
    config: FrontendConfig,
    ping: bytes,
) -> Generator[EventSender, None, None]:
    """Yield what sends the events of an answer. It sends pings until the `with` block ends.

    Args:
        answer: the answer; only a stream gets pings.
        response: where it is sent.
        timeline: that of the request. The silence began when its body was there.
        config: says how long a silence may be.
        ping: an event that clients know; b"": a comment.
    """
    seconds = config.sse_keep_alive_s
    if not answer.is_streamed or not seconds:
        yield response
        return
    begun_s = timeline.body_received_s
    sender = KeepAlive(response, seconds, begun_s, answer.headers, ping or COMMENT)
    try:
        yield sender
    finally:
        sender.stop()
