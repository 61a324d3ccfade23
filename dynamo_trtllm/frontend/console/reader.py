"""One open console: a stream of server-sent events that never waits for its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from dynamo_trtllm.protocol.errors import DynamoError, Overloaded
from dynamo_trtllm.support.http_server.exchange import HttpResponse

MAX_SKIPPED: Final = 10  # snapshots that a client has not read, before its stream ends
SHUTDOWN: Final = b"event: shutdown\ndata: {}\n\n"


@dataclass(eq=False)
class ConsoleReader:
    """A reader of snapshots. Snapshots that come while its client does not read are skipped.

    Args:
        response: the stream of events, which must be started before `push`.
        check: raises a DynamoError once the client may not read any more.
    """

    _response: HttpResponse
    _check: Callable[[], None]
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _num_skipped: int = field(default=0, init=False)
    _last: bytes = field(default=b"", init=False)  # the events that end the stream
    # Why the stream ended without last events: the client reads too slowly.
    error: DynamoError | None = field(default=None, init=False)

    def push(self, events: bytes) -> None:
        """Send events, unless the client does not read."""
        if self._ended.is_set():
            return
        try:
            self._check()
        except DynamoError as error:
            about = {"code": error.code, "message": error.message}
            self.end(encode_event("error", about))
            return
        if self._response.is_writable:
            self._num_skipped = 0
            self._response.write(events)
            return
        self._num_skipped += 1
        if self._num_skipped > MAX_SKIPPED:
            self.error = Overloaded("the client of this console reads too slowly; reload the page")
            self._ended.set()

    def end(self, events: bytes = SHUTDOWN) -> None:
        """End the stream with these events. Later snapshots are dropped."""
        self._last = events
        self._ended.set()

    async def until_ended(self) -> bytes:
        """Wait for the end of the stream. Return the last events."""
        await self._ended.wait()
        return self._last


def encode_event(name: str, value: Any) -> bytes:
    """Return a server-sent event. JSON has no line breaks."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
