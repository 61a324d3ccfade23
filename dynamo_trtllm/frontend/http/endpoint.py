"""Handle a request with a JSON body: read and parse it within limits, and answer in every case."""

from __future__ import annotations

import asyncio
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TypeVar

from dynamo_trtllm.api.request_model import RequestModel, parse
from dynamo_trtllm.api.unknown_fields import IgnoredFields
from dynamo_trtllm.background import in_thread
from dynamo_trtllm.errors import DeadlineExceeded, DynamoError, Overloaded
from dynamo_trtllm.frontend.http.request_context import AppState, RequestContext
from dynamo_trtllm.http_server.exchange import ClientDisconnected, HttpRequest, HttpResponse
from dynamo_trtllm.http_status import RETRY_AFTER_S
from dynamo_trtllm.streams import unexpected_error
from dynamo_trtllm.tokenization.renderer import INLINE_BYTES
from dynamo_trtllm.tokenization.served_model import ServedModel

log = logging.getLogger(__name__)

M = TypeVar("M", bound=RequestModel)
V = TypeVar("V")

# Messages, tools and parts of them. Each takes as long as half a kilobyte of text.
_MANY_OBJECTS = 500
# Code in a message has braces, too: there, a quotation mark is escaped.
_OBJECT = re.compile(rb'\{[ \t\n\r]*["}]')
# The time is limited for which the event loop plans larger bodies before it does other work.
_TURN_BYTES = 16 << 10
_FEW_CHOICES = 4  # requests with more of them are planned within the same limit
# Of text without words, which takes up to twenty times as long to tokenize.
_WORDLESS_BYTES = 48 << 10
_SAMPLED = 61  # one byte of so many is looked at
_BYTES_PER_BLANK = 16  # more of them: text without words. English and code have 4 to 8


def is_large_body(raw_body: bytes) -> bool:
    """Return whether the body is parsed and rendered in a thread: it would delay other streams."""
    size = len(raw_body)
    if size > INLINE_BYTES:
        return True
    if size > _WORDLESS_BYTES:
        num_blanks = raw_body[::_SAMPLED].count(b" ") * _SAMPLED
        if num_blanks * _BYTES_PER_BLANK < size:
            return True
    if size <= _TURN_BYTES:
        return False
    # Most bodies have few braces. `find` skips text ten times as fast as `count` and the pattern.
    position = -1
    for _ in range(_MANY_OBJECTS):
        position = raw_body.find(b"{", position + 1)
        if position < 0:
            return False
    return len(_OBJECT.findall(raw_body)) > _MANY_OBJECTS


class Endpoint(ABC):
    """The handler of a path with JSON bodies.

    What it knows of a request is in the request's context.

    Args:
        name: the value of the metric label `endpoint`.
    """

    def __init__(self, name: str, app_state: AppState) -> None:
        self._name = name
        self._app_state = app_state

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer the request in every case.

        A disconnect cancels this task. Raises ClientDisconnected.
        """
        response.cancel_on_disconnect()
        context = RequestContext(self._app_state, self._name, request)
        outcome: str | DynamoError = "cancelled"
        try:
            outcome = await self._outcome(context, request, response)
            if isinstance(outcome, DynamoError):
                context.release_body()  # others may wait for its memory
                # Thousands of requests may fail at once.
                async with self._app_state.ending_time.turn():
                    await self._fail(outcome, response, context)
        finally:
            if context.keep_alive is not None:
                context.keep_alive.stop()
                # It refers to the context: a cycle that would keep the body in memory.
                context.keep_alive = None
            context.end(outcome, response.status)
            # An error refers to this frame. If the frame also referred to it, the cycle would keep
            # the body in memory.
            del outcome

    async def _outcome(
        self, context: RequestContext, request: HttpRequest, response: HttpResponse
    ) -> str | DynamoError:
        """Serve the request. Return "ok" or its error, which the client does not have yet.

        The error is not being handled any more when its caller waits. Otherwise, a cancel of that
        wait would refer to the error and, through a time limit that has passed, to the task: a
        cycle that would keep the body in memory.

        Raises ClientDisconnected.
        """
        try:
            await self._serve(context, request, response)
        except ClientDisconnected:
            raise
        except MemoryError:
            # A traceback would take more memory.
            log.error("request %s failed: out of memory; lower --max-total-body-bytes", context.id)
            return Overloaded(
                "the server is out of memory for this request; try again later or send a"
                " shorter one"
            )
        except Exception as error:  # noqa: BLE001 - any bug: logged here, answered as `internal`
            if isinstance(error, DynamoError):
                return error
            return unexpected_error(error, context.id)
        return "ok"

    @abstractmethod
    async def _serve(
        self, context: RequestContext, request: HttpRequest, response: HttpResponse
    ) -> None:
        """Send the response.

        Raises any error; the caller then reports it to the client with `_fail`.
        """

    async def _fail(
        self, error: DynamoError, response: HttpResponse, context: RequestContext
    ) -> None:
        """Send the error."""
        retry_after_s = RETRY_AFTER_S
        if isinstance(error, Overloaded):
            retry_after_s = self._app_state.limiter.retry_after_s()
        response.send_error(error, retry_after_s)

    def _slot(self, *, is_large: bool) -> AbstractAsyncContextManager[None]:
        """Return the slot in which a body is processed. Only large bodies wait for theirs."""
        return self._large_body_slot() if is_large else nullcontext()

    async def _parse(
        self, model: type[M], raw_body: bytes, ignored: IgnoredFields | None, *, is_large: bool
    ) -> M:
        """Parse the body, a large one in a thread. Raises as `parse`."""
        if is_large:
            return await in_thread(parse, model, raw_body, ignored)
        return parse(model, raw_body, ignored)

    async def _tokenize(
        self,
        context: RequestContext,
        served: ServedModel,
        prepare: Callable[[], V],
        size: int,
        *,
        is_large: bool,
        num_choices: int = 1,
    ) -> V:
        """Run the work that renders and tokenizes a request, where it delays no stream.

        Args:
            served: the model of the request.
            prepare: the work, which may take long and is safe in a thread.
            size: bytes or characters of the texts.
            is_large: the body is large.
            num_choices: choices of the request.
        """
        context.enter("tokenize")
        renderer = served.renderer
        if not is_large and not renderer.is_loaded and size > renderer.inline_bytes:
            self._app_state.models.preload(served.card.name)
        if is_large or size > renderer.inline_bytes:
            return await in_thread(prepare)
        if size <= _TURN_BYTES and num_choices <= _FEW_CHOICES:
            return prepare()
        context.enter("tokenize_queue")
        async with self._app_state.planning_time.turn():
            context.enter("tokenize")
            return prepare()

    def _choices_turn(self, num_choices: int) -> AbstractAsyncContextManager[None]:
        """Return the turn in which the choices of a request are created.

        Requests with few choices need not wait.
        """
        if num_choices <= _FEW_CHOICES:
            return nullcontext()
        return self._app_state.planning_time.turn()

    @asynccontextmanager
    async def _large_body_slot(self) -> AsyncGenerator[None, None]:
        """Limit how many large bodies are processed at once.

        Each takes several times its size in memory.

        Raises:
            DeadlineExceeded: the bodies before this one took too long.
        """
        try:
            async with asyncio.timeout(self._app_state.config.request_timeout_s):
                await self._app_state.large_bodies.acquire()
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's deadline passed while other large requests were parsed"
            ) from None
        try:
            yield
        finally:
            self._app_state.large_bodies.release()
