"""Read the body of a request within limits of size and time, and parse it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from dynamo_trtllm.frontend.api.request_model import RequestModel, parse
from dynamo_trtllm.frontend.api.unknown_fields import IgnoredFields
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.frontend.tokenization.renderer import INLINE_BYTES
from dynamo_trtllm.protocol import errors
from dynamo_trtllm.support.background import in_thread
from dynamo_trtllm.support.freed_memory import return_freed_memory
from dynamo_trtllm.support.http_server.exchange import HttpRequest

M = TypeVar("M", bound=RequestModel)

SLOW_BYTES_PER_S = 64 << 10  # bodies that arrive faster are not evicted
# The sizes of the largest tiny body and of the largest small one, see `BodyBudget`. 16 KiB are a
# chat of about 4,000 tokens.
TINY_BODY_BYTES = 16 << 10
SMALL_BODY_BYTES = 128 << 10

# A body with more objects than this is large. Objects are messages, tools and parts of them. An
# object takes as long as half a kilobyte of text.
_MANY_OBJECTS = 500
# The beginning of an object. Code in a message has braces, too, but quotation marks are escaped
# there.
_OBJECT = re.compile(rb'\{[ \t\n\r]*["}]')
# Larger bodies are planned in turns: the event loop plans them for a limited time, then does other
# work. If their text has no words, they are planned in a thread: to tokenize such text takes up to
# twenty times as long, 15 ms for 48 KiB.
TURN_BYTES = 16 << 10
_SAMPLE_STRIDE = 61  # each 61st byte is looked at
# A text with more bytes than this for each blank has no words. English and code have 4 to 8.
_BYTES_PER_BLANK = 16


@dataclass(slots=True, eq=False)
class BodyBytes:
    """The part of the budget that one request body uses."""

    number: int  # bodies are numbered in order of arrival
    client: str  # network address of the client
    # The rate at which the body arrives is measured from this time: when the body began to arrive,
    # plus the time for which it has waited for its share of the budget.
    since_s: float
    in_use: int = 0  # bytes that the body uses
    arrival: asyncio.Timeout | None = None  # the time limit of a body that is being received
    is_evicted: bool = False


@dataclass(slots=True, eq=False)
class _WaitingBody:
    """A body that waits for its share of the budget."""

    body: BodyBytes
    count: int  # how many bytes it waits for
    # The body gets them only if all bodies then use at most this many bytes. The favored body may
    # exceed this limit.
    max_bytes: int
    granted: asyncio.Future[None]

    def __lt__(self, other: _WaitingBody) -> bool:
        return self.body.number < other.body.number


class BodyBudget:
    """The bytes of all request bodies that are being received or parsed.

    Large bodies share one half of the budget, and an eighth is only for tiny bodies, so that small
    requests are served meanwhile. When the half is full, the oldest large body that waits may use a
    quarter more until it is released: without this, partly received bodies would wait for each
    other. The quarter stays reserved for this body between two of its parts.

    When a body does not get its share at once, bodies that arrive slowly are evicted. The bodies of
    the client that uses the most bytes come first, and of these the slowest one comes first.
    """

    def __init__(
        self,
        limit: int,
        wait_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        eviction_age_s: float = 1.0,
        returned_bytes: int = 64 << 20,
        return_after_s: float = 1.0,
    ) -> None:
        """Set the limits.

        Args:
            limit: bytes of all bodies.
            wait_s: for how long each chunk of a body waits for its share.
            clock: returns seconds of a monotonic clock.
            eviction_age_s: a body that is younger is not evicted.
            returned_bytes: memory is returned to the system after bodies have used this much of it.
            return_after_s: time from the end of the last body until memory is returned.
        """
        self._eviction_age_s = eviction_age_s
        self._returned_bytes = returned_bytes
        self._return_after_s = return_after_s
        self.limit = limit
        self.in_use = 0
        self._most_in_use = 0  # the most bytes since memory was returned to the system
        self._wait_s = wait_s
        self._clock = clock
        self._numbers = itertools.count()
        self._arriving: dict[BodyBytes, None] = {}
        self._eviction: asyncio.TimerHandle | None = None  # set while bodies wait
        # The bytes of bodies that were evicted and are not released yet.
        self._evicted_bytes = 0
        self._waiting: dict[BodyBytes, _WaitingBody] = {}
        # Heaps of waiting bodies, by `max_bytes`. The body that arrived first comes first. Some
        # entries do not wait any more.
        self._queues: dict[int, list[_WaitingBody]] = {}
        self._favored: BodyBytes | None = None  # the body that may use a quarter more

    def body(self, client: str = "") -> BodyBytes:
        """Return the account of a new body. `client`: network address of its sender."""
        return BodyBytes(next(self._numbers), client, self._clock())

    @asynccontextmanager
    async def arrival(self, body: BodyBytes, within_s: float | None) -> AsyncGenerator[None, None]:
        """Limit the time in which a `with` block receives the body.

        Meanwhile, the body may be evicted.

        Raises:
            RequestTimeout: the body did not arrive in time, or was evicted because it arrives
                slowly.
        """
        self._arriving[body] = None
        try:
            async with asyncio.timeout(within_s) as body.arrival:
                yield
        except TimeoutError:
            if body.is_evicted:
                raise errors.RequestTimeout(
                    f"the request body arrived at less than {SLOW_BYTES_PER_S >> 10} KiB/s while"
                    " other requests needed its memory (--max-total-body-bytes); send it faster"
                ) from None
            raise errors.RequestTimeout(
                f"the request body did not arrive within {within_s:g} s; send it faster"
            ) from None
        finally:
            body.arrival = None
            self._arriving.pop(body, None)

    async def acquire(self, count: int, body: BodyBytes) -> None:
        """Reserve `count` more bytes for the body.

        Raises:
            Overloaded: the bytes were not free in time.
        """
        if not self._waiting and self.in_use + count <= self._max_bytes(body.in_use + count):
            self.in_use += count
            body.in_use += count
            return
        begun_s = self._clock()
        granted = asyncio.get_running_loop().create_future()
        waiting = _WaitingBody(body, count, self._max_bytes(body.in_use + count), granted)
        self._waiting[body] = waiting
        heapq.heappush(self._queues.setdefault(waiting.max_bytes, []), waiting)
        self._grant()
        if self._eviction is None:
            self._evict()
        try:
            async with asyncio.timeout(self._wait_s):
                await granted
        except TimeoutError:
            raise errors.Overloaded(
                f"request bodies in progress use {self.in_use} of {self.limit} bytes"
                " (--max-total-body-bytes); try again later"
            ) from None
        finally:
            body.since_s += self._clock() - begun_s
            self._waiting.pop(body, None)

    def release(self, body: BodyBytes) -> None:
        """Free all bytes of the body. Idempotent."""
        if not body.in_use and self._favored is not body:
            return
        if self.in_use > self._most_in_use:
            self._most_in_use = self.in_use
        self.in_use -= body.in_use
        if not self.in_use and self._most_in_use >= self._returned_bytes:
            self._most_in_use = 0
            loop = asyncio.get_running_loop()
            loop.call_later(self._return_after_s, return_freed_memory)
        if body.is_evicted:
            self._evicted_bytes -= body.in_use
        body.in_use = 0
        if self._favored is body:
            self._favored = None
        if self._waiting:
            self._grant()

    def _max_bytes(self, size: int) -> int:
        """Return how many bytes may be in use when a body grows to this size.

        The favored body may exceed this limit, see `_fits`.
        """
        if size <= TINY_BODY_BYTES:
            return self.limit
        if size <= SMALL_BODY_BYTES:
            return self.limit - self.limit // 8
        return self.limit // 2

    def _grant(self) -> None:
        """Give waiting bodies their share, as long as it is free.

        The CPU time does not depend on how many bodies wait: of the bodies with the same limit,
        only the first one is looked at.
        """
        waiting = self._next()
        while waiting is not None:
            self.in_use += waiting.count
            waiting.body.in_use += waiting.count
            del self._waiting[waiting.body]
            waiting.granted.set_result(None)
            waiting = self._next()

    def _next(self) -> _WaitingBody | None:
        """Return the body that gets its share next; None if none fits."""
        candidates = []
        if self._favored in self._waiting:
            candidates.append(self._waiting[self._favored])
        for queue in self._queues.values():
            while queue and queue[0].granted.done():
                heapq.heappop(queue)
            if queue:
                candidates.append(queue[0])
        for waiting in sorted(candidates):
            if waiting.granted.done():
                continue
            if self._fits(waiting):
                return waiting
            is_large = waiting.body.in_use + waiting.count > SMALL_BODY_BYTES
            if is_large and self._favored is None:
                # The oldest large body that waits may now use more.
                self._favored = waiting.body
                if self._fits(waiting):
                    return waiting
        return None

    def _fits(self, waiting: _WaitingBody) -> bool:
        """Return whether a body can have its share."""
        in_use = self.in_use + waiting.count
        if in_use <= waiting.max_bytes:
            return True
        # The favored body may use the half of large bodies, and a quarter more.
        return waiting.body is self._favored and in_use <= self.limit // 4 * 3

    def _evict(self) -> None:
        """End slow bodies, now and at intervals, as long as other bodies wait for their share."""
        self._eviction = None
        if self._waiting:
            self._eviction = asyncio.get_running_loop().call_later(
                self._eviction_age_s, self._evict
            )
            self._evict_slow(self._lacking_bytes() - self._evicted_bytes)

    def _lacking_bytes(self) -> int:
        """Return how many bytes must become free so that all waiting bodies get their share."""
        wanted_bytes = 0
        least_max_bytes = self.limit
        for waiting in self._waiting.values():
            wanted_bytes += waiting.count
            least_max_bytes = min(least_max_bytes, waiting.max_bytes)
        return self.in_use + wanted_bytes - least_max_bytes

    def _evict_slow(self, lacking_bytes: int) -> None:
        """End slow bodies until their release frees `lacking_bytes`."""
        if lacking_bytes <= 0:
            return
        by_client: Counter[str] = Counter()
        for body in self._arriving:
            by_client[body.client] += body.in_use
        slow = [body for body in self._arriving if self._is_slow(body)]
        slow.sort(key=lambda body: (-by_client[body.client], self._rate(body)))
        for body in slow:
            if lacking_bytes <= 0:
                return
            lacking_bytes -= body.in_use
            self._evicted_bytes += body.in_use
            body.is_evicted = True
            assert body.arrival is not None
            body.arrival.reschedule(0.0)

    def _is_slow(self, body: BodyBytes) -> bool:
        if not body.in_use or body in self._waiting:
            return False
        if body.arrival is None or body.arrival.expired():
            return False
        age_s = self._clock() - body.since_s
        return age_s >= self._eviction_age_s and self._rate(body) < SLOW_BYTES_PER_S

    def _rate(self, body: BodyBytes) -> float:
        """Return the bytes per second at which a body has arrived."""
        return body.in_use / max(self._clock() - body.since_s, self._eviction_age_s)


def check_json(request: HttpRequest) -> None:
    """Raise UnsupportedMedia unless the headers declare that the body is JSON, not compressed.

    Bodies without a type, or with the type of a form, are rejected, because browsers let every web
    page send such bodies to any server.
    """
    content_type = request.header(b"content-type")
    if content_type is None:
        raise errors.UnsupportedMedia(
            "the header Content-Type is missing; send Content-Type: application/json"
        )
    kind = content_type.split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise errors.UnsupportedMedia(
            f"Content-Type {kind!r} is not supported; send application/json"
        )
    encoding = (request.header(b"content-encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise errors.UnsupportedMedia(
            f"Content-Encoding {encoding!r} is not supported; send the body uncompressed"
        )


async def read_body(
    request: HttpRequest, max_bytes: int, within_s: float, budget: BodyBudget, body: BodyBytes
) -> bytes:
    """Return the body.

    Args:
        max_bytes: limit of the body's size.
        within_s: seconds until the whole body must have arrived.
        budget: where the bytes are reserved.
        body: account of the body in the budget.

    Raises:
        PayloadTooLarge: the body is too large; raised as soon as this is known.
        RequestTimeout: the client did not send it in time, or slowly while other requests needed
            its memory.
        Overloaded: other bodies use all of the budget.
        ClientDisconnected: the client disconnected before the end.
    """
    declared = request.header(b"content-length")
    # The number may follow thousands of zeros, and Python converts at most 4300 digits.
    digits = (declared or "").lstrip("0")
    if digits.isdecimal() and int(digits) > max_bytes:
        raise _too_large(max_bytes)
    if request.is_complete:
        return await _receive_body(request, max_bytes, budget, body)
    async with budget.arrival(body, within_s):
        return await _receive_body(request, max_bytes, budget, body)


async def _receive_body(
    request: HttpRequest, max_bytes: int, budget: BodyBudget, body: BodyBytes
) -> bytes:
    parts = []
    size = 0
    try:
        while part := await request.receive():
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            await budget.acquire(len(part), body)
            parts.append(part)
        return b"".join(parts)
    finally:
        # An error refers to this frame, and would keep the parts in memory.
        parts.clear()


def _too_large(max_bytes: int) -> errors.PayloadTooLarge:
    return errors.PayloadTooLarge(
        f"the request body is larger than the limit of {max_bytes} bytes; send a shorter one"
    )


class RequestBody:
    """The body of a request, until the request is planned.

    Args:
        data: its bytes.
        timeline: the timeline of the request.
    """

    def __init__(self, data: bytes, timeline: RequestTimeline) -> None:
        self.data = data
        self.is_large = is_large_body(data)
        self.timeline = timeline

    async def parse(self, model: type[M], unknown: IgnoredFields | None) -> M:
        """Parse the body, a large one in a thread. `unknown`: collects unknown fields.

        Raises the errors of `request_model.parse`.
        """
        self.timeline.enter("tokenize")
        if self.is_large:
            return await in_thread(parse, model, self.data, unknown)
        return parse(model, self.data, unknown)


def is_large_body(raw_body: bytes) -> bool:
    """Return whether the body is parsed and rendered in a thread.

    In the event loop, such a body would delay other streams.
    """
    size = len(raw_body)
    if size > INLINE_BYTES:
        return True
    if size <= TURN_BYTES:
        return False
    num_blanks = raw_body[::_SAMPLE_STRIDE].count(b" ") * _SAMPLE_STRIDE
    has_words = num_blanks * _BYTES_PER_BLANK >= size
    if not has_words:
        return True
    # Most bodies have few braces. `find` skips text ten times as fast as `count` and the pattern.
    position = -1
    for _ in range(_MANY_OBJECTS):
        position = raw_body.find(b"{", position + 1)
        if position < 0:
            return False
    return len(_OBJECT.findall(raw_body)) > _MANY_OBJECTS
