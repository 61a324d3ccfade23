"""Admit requests: hold the bytes of their bodies, and the permits of their choices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Self

from dynamo_trtllm.background import MAX_THREADS
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DeadlineExceeded, InvalidRequest
from dynamo_trtllm.frontend.requests.body_budget import BodyBudget, read_body
from dynamo_trtllm.frontend.requests.concurrency_limiter import ConcurrencyLimiter
from dynamo_trtllm.frontend.requests.request_body import RequestBody
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.http_server.exchange import HttpRequest


class AdmissionLimits:
    """What all requests share: the bytes of bodies, the permits of choices, and threads."""

    def __init__(self, config: FrontendConfig) -> None:
        self.config = config
        self.body_budget = BodyBudget(config.max_total_body_bytes)
        self.choices = ConcurrencyLimiter(config.max_inflight, config.max_queued)
        self._large_bodies = asyncio.Semaphore(MAX_THREADS)

    def slot(self, *, is_large: bool) -> AbstractAsyncContextManager[None]:
        """Return the slot in which a body is processed. Only large bodies wait for theirs."""
        return self._large_body_slot() if is_large else nullcontext()

    @asynccontextmanager
    async def _large_body_slot(self) -> AsyncGenerator[None, None]:
        """Limit how many large bodies are processed at once.

        Each takes several times its size in memory.

        Raises:
            DeadlineExceeded: the bodies before this one took too long.
        """
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                await self._large_bodies.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's deadline passed while other large requests were parsed"
            ) from None
        try:
            await waiting.granted
        finally:
            self._large_bodies.release()


class RequestAdmission:
    """What one request has taken of the limits. The end of its `with` block releases all of it."""

    def __init__(self, limits: AdmissionLimits, timeline: RequestTimeline) -> None:
        self._limits = limits
        self._timeline = timeline
        self._body_bytes = limits.body_budget.body(timeline.facts.client)
        self._num_permits = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._release_body()
        self._limits.choices.release(self._num_permits)
        self._num_permits = 0

    def check_queue(self) -> None:
        """Raise Overloaded if there is no place in the queue.

        Call it before the body is read.
        """
        self._limits.choices.check(self._timeline.facts.client)

    @asynccontextmanager
    async def body(self, request: HttpRequest) -> AsyncGenerator[RequestBody, None]:
        """Read the body, and hold its bytes while a `with` block parses and plans it.

        A large body waits for the slot of a thread. After an error, the bytes are held until the
        error was answered, because it refers to them.

        Raises:
            PayloadTooLarge, RequestTimeout, Overloaded, ClientDisconnected: as `read_body`.
            DeadlineExceeded: other large bodies took too long.
        """
        config = self._limits.config
        received = RequestBody(
            await read_body(
                request,
                config.max_body_bytes,
                config.receive_timeout_s,
                self._limits.body_budget,
                self._body_bytes,
            ),
            self._timeline,
        )
        self._timeline.body_received()
        async with self._limits.slot(is_large=received.is_large):
            yield received
        received.data = b""
        self._release_body()

    def check_choices(self, count: int) -> None:
        """Raise InvalidRequest if a request may not have so many choices."""
        limit = self._limits.choices.limit
        if count > limit:
            raise InvalidRequest(
                f"the request has {count} choices; this server runs at most {limit} at once,"
                " lower n"
            )

    async def acquire_permits(self, count: int, deadline: float) -> None:
        """Wait for the permits of all choices.

        Args:
            count: the number of choices.
            deadline: seconds since the epoch.

        Raises:
            Overloaded, DeadlineExceeded: as `ConcurrencyLimiter.acquire`.
        """
        client = self._timeline.facts.client
        self._timeline.enter("frontend_queue")
        try:
            await self._limits.choices.acquire(count, client, deadline - time.time())
        finally:
            self._timeline.left_queue()
        self._timeline.enter("select")
        self._num_permits = count

    def _release_body(self) -> None:
        self._limits.body_budget.release(self._body_bytes)
