"""Serve a generating endpoint: admit a request, read its body, run its choices, and answer in every case."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any, Generic, Protocol, TypeAlias

from msgspec.structs import replace

from dynamo_trtllm.api.request_model import parse
from dynamo_trtllm.api.response_schemas import ResponseMeta
from dynamo_trtllm.api.unknown_fields import IgnoredFields
from dynamo_trtllm.background import in_thread
from dynamo_trtllm.errors import Cancelled, DeadlineExceeded, DynamoError, InvalidRequest, Overloaded
from dynamo_trtllm.frontend.generation.choice import ChoiceDelta, pick_best_of
from dynamo_trtllm.frontend.generation.completions import CompletionBuilder
from dynamo_trtllm.frontend.generation.preprocess import B, GenerationPlan
from dynamo_trtllm.frontend.generation.responses.response_builder import ResponseBuilder
from dynamo_trtllm.frontend.http.admission import check_json
from dynamo_trtllm.frontend.http.keep_alive import KeepAlive
from dynamo_trtllm.frontend.http.request_context import AppState, RequestContext
from dynamo_trtllm.http_server.errors import RETRY_AFTER_S
from dynamo_trtllm.http_server.exchange import ClientDisconnected, HttpRequest, HttpResponse
from dynamo_trtllm.messages import GenerateRequest
from dynamo_trtllm.streams import unexpected_error
from dynamo_trtllm.tokenization.base import INLINE_BYTES, ServedModel

log = logging.getLogger(__name__)

MAX_PENDING_TOKENS = 262_144  # per choice, for a client that reads slowly
_MANY_OBJECTS = 500  # messages, tools and parts of them; each takes as long as half a kilobyte of text
_OBJECT = re.compile(rb'\{[ \t\n\r]*["}]')  # code in a message has braces, too: there, a quotation mark is escaped
_MAX_SESSION_ID = 256
_TURN_BYTES = 16 << 10  # the time is limited for which the event loop plans larger bodies before it does other work
_WORDLESS_BYTES = 48 << 10  # of text without words, which takes up to twenty times as long to tokenize
_SAMPLED = 61  # one byte of so many is looked at
_BYTES_PER_BLANK = 16  # more of them: text without words. English and code have 4 to 8


AnswerBuilder: TypeAlias = CompletionBuilder | ResponseBuilder


class ApiAdapter(Protocol[B]):
    """One generating endpoint of the API."""

    endpoint: str  # the value of the metric label `endpoint`
    id_prefix: str
    body: type[B]
    prompt: frozenset[str]  # the body's fields that are not needed any more after planning

    async def resolve(
        self, body: B, served: ServedModel, call: GenerateRequest
    ) -> tuple[Callable[[], GenerationPlan], int]:
        """Read what the request refers to. Raises RequestError.

        Args:
            call: that of the body, without prompt and sampling values.

        Returns:
            The work that plans the request, and the characters of stored text that it renders. The work may take long,
            is safe in a thread, and raises RequestError if the request is wrong or not supported.
        """

    def builder(self, meta: ResponseMeta, body: B, plan: GenerationPlan) -> AnswerBuilder:
        """Return the encoder of the response's events if it is streamed, otherwise its aggregator."""

    async def on_complete(self, answer: Any, client: str) -> None:
        """Handle a complete response before its last part is sent.

        Args:
            answer: what `builder` returned.
            client: the client's network address; "" if unknown.
        """


def _session_id(request: HttpRequest) -> str:
    """Return the conversation of a request as its header names it; "" without one. Raises InvalidRequest."""
    session_id = (request.header(b"x-session-id") or "").strip()
    if len(session_id) > _MAX_SESSION_ID:
        raise InvalidRequest(f"X-Session-ID has {len(session_id)} characters; at most {_MAX_SESSION_ID} are allowed")
    return session_id


def is_large_body(raw_body: bytes) -> bool:
    """Return whether the body is parsed and rendered in a thread, because it would delay other streams."""
    size = len(raw_body)
    if size > INLINE_BYTES:
        return True
    if size > _WORDLESS_BYTES and raw_body[::_SAMPLED].count(b" ") * _SAMPLED * _BYTES_PER_BLANK < size:
        return True
    if size <= _TURN_BYTES:
        return False
    at = -1
    for _ in range(_MANY_OBJECTS):  # `find` skips text ten times as fast as `count` and the pattern
        at = raw_body.find(b"{", at + 1)
        if at < 0:
            return False
    return len(_OBJECT.findall(raw_body)) > _MANY_OBJECTS


class GenerateEndpoint(Generic[B]):
    """The handler of one API adapter's requests. What it knows of a request is in the request's context."""

    def __init__(self, adapter: ApiAdapter[B], app_state: AppState) -> None:
        self._adapter = adapter
        self._app_state = app_state

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer the request in every case. A disconnect cancels this task. Raises ClientDisconnected."""
        response.cancel_on_disconnect()
        context = RequestContext(self._app_state, self._adapter.endpoint, request)
        outcome: str | DynamoError = "cancelled"
        try:
            await self._serve(context, request, response)
            outcome = "ok"
        except ClientDisconnected:
            raise
        except MemoryError:
            # A traceback would take more memory.
            log.error("request %s failed: out of memory; lower --max-total-body-bytes", context.id)
            outcome = Overloaded("the server is out of memory for this request; try again later or send a shorter one")
            await self._fail(outcome, response, context)
        except Exception as error:  # noqa: BLE001 - any bug: logged here, answered as `internal`
            outcome = error if isinstance(error, DynamoError) else unexpected_error(error, context.id)
            await self._fail(outcome, response, context)
        finally:
            if context.keep_alive is not None:
                context.keep_alive.stop()
                context.keep_alive = None  # it refers to the context: a cycle that would keep the body in memory
            context.end(outcome, response.status)
            # An error refers to this frame. If the frame also referred to it, the cycle would keep the body in memory.
            del outcome

    async def _serve(self, context: RequestContext, request: HttpRequest, response: HttpResponse) -> None:
        """Send the response. Raises any error; the caller then reports it to the client with `_fail`."""
        adapter = self._adapter
        self._app_state.limiter.check()
        check_json(request)
        body, plan = await self._plan(context, request)
        context.release_body()
        response.deadline = context.deadline
        context.create_choices(plan, adapter.id_prefix)
        meta = ResponseMeta(id=context.answer_id, model=body.model, created=int(time.time()))
        context.is_streamed, context.builder = body.stream, adapter.builder(meta, body, plan)
        if body.stream and (seconds := self._app_state.config.sse_keep_alive_s):
            context.keep_alive = KeepAlive(response, seconds, context.received_s, context.served_by)
        await context.acquire_permits()
        task, running = asyncio.current_task(), self._app_state.running
        assert task is not None
        running[context.answer_id] = context, task
        try:
            if body.stream:
                await self._stream(context, response, context.builder)
            else:
                await self._aggregate(context, response, plan, context.builder)
        except asyncio.CancelledError:
            if context.is_cancelled:
                raise Cancelled(f"{context.answer_id} was cancelled on request") from None
            raise
        finally:
            del running[context.answer_id]

    async def _plan(self, context: RequestContext, request: HttpRequest) -> tuple[B, GenerationPlan]:
        """Read the body, parse it and plan the request. The returned body has no prompt, to free its memory."""
        adapter, raw_body = self._adapter, await context.read_body(request)
        unknown_fields = self._app_state.config.unknown_fields
        is_strict, warns = unknown_fields == "reject", unknown_fields == "warn"
        ignored = None if is_strict else IgnoredFields(rejects_misspelled=warns)
        is_large = is_large_body(raw_body)
        async with self._large_body_slot() if is_large else nullcontext():
            context.enter("tokenize")
            if is_large:
                body = await in_thread(parse, adapter.body, raw_body, ignored)
            else:
                body = parse(adapter.body, raw_body, ignored)
            context.set_timeout(body.timeout)
            context.extra_fields = frozenset(body.nvext.extra_fields)
            served = self._app_state.models.get(body.model)
            context.enter("load")
            call = body.call(context.id, context.deadline, _session_id(request))
            if context.traceparent is not None:
                call = replace(call, traceparent=context.traceparent)
            prepare, stored_chars = await adapter.resolve(body, served, call)
            context.enter("tokenize")
            size = max(len(raw_body), stored_chars)
            if not is_large and not served.renderer.is_loaded and size > served.renderer.inline_bytes:
                self._app_state.models.preload(body.model)
            if is_large or size > served.renderer.inline_bytes:
                plan = await in_thread(prepare)
            elif size <= _TURN_BYTES:
                plan = prepare()
            else:
                context.enter("tokenize_queue")
                async with self._app_state.planning_time.turn():
                    context.enter("tokenize")
                    plan = prepare()
            if unknown_fields != "ignore":
                context.report_ignored([*(ignored or ()), *plan.ignored], request)
            return body.model_copy(update=dict.fromkeys(adapter.prompt)), plan

    @asynccontextmanager
    async def _large_body_slot(self) -> AsyncGenerator[None, None]:
        """Limit how many large bodies are processed at once, because each takes several times its size in memory.

        Raises:
            DeadlineExceeded: the bodies before this one took too long.
        """
        try:
            async with asyncio.timeout(self._app_state.config.request_timeout_s):
                await self._app_state.large_bodies.acquire()
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while other large requests were parsed") from None
        try:
            yield
        finally:
            self._app_state.large_bodies.release()

    async def _deltas(self, context: RequestContext, response: HttpResponse) -> AsyncGenerator[ChoiceDelta, None]:
        """Run all choices. Yield their deltas that were not written at once; the first error ends all choices.

        A delta of a stream is written within the call that has its tokens. It waits to be yielded while the client
        reads slowly, behind earlier ones or an error, and if it is the last of its choice.
        """
        arrived: asyncio.Queue[ChoiceDelta | DynamoError] = asyncio.Queue()
        limit, num_pending = MAX_PENDING_TOKENS * len(context.choices), 0  # tokens and deltas that are not sent yet
        encoder = context.builder if context.is_streamed else None
        observe = context.observe
        write = response.write if context.keep_alive is None else context.keep_alive.write

        def deliver(item: ChoiceDelta | DynamoError) -> None:
            nonlocal num_pending
            if isinstance(item, ChoiceDelta):
                observe(item)
                if item.finish is None and not num_pending and encoder is not None:
                    if not context.has_begun:  # in a task, it would be later, and all deltas until then would wait
                        _start(context, response, encoder)
                    if response.is_writable:
                        if data := encoder.delta(item):
                            write(data)
                        return
                num_pending += item.tokens + 1
                if num_pending > limit:
                    context.cancel()
                    item = Overloaded(f"the client reads too slowly: over {limit} tokens are pending")
            else:
                num_pending += 1  # no delta overtakes the error
            arrived.put_nowait(item)

        num_running = len(context.choices)
        item: ChoiceDelta | DynamoError | None = None
        try:
            for choice in context.choices:
                choice.start(self._app_state.pipeline, deliver)
            while num_running:
                item = await arrived.get()
                if isinstance(item, DynamoError):
                    raise item
                yield item
                num_pending -= item.tokens + 1
                num_running -= item.finish is not None
        finally:
            context.cancel()
            # An error refers to this frame. If the frame also referred to it, the cycle would keep the body in memory.
            item = None
            while not arrived.empty():
                arrived.get_nowait()

    async def _stream(self, context: RequestContext, response: HttpResponse, encoder: AnswerBuilder) -> None:
        num_unfinished = len(context.choices)  # all are returned: `best_of` is rejected with `stream`
        sender = context.keep_alive or response
        async with aclosing(self._deltas(context, response)) as deltas:
            async for delta in deltas:
                if not context.has_begun:
                    _start(context, response, encoder)
                data = encoder.delta(delta)
                if delta.finish is not None:
                    num_unfinished -= 1
                    if not num_unfinished:
                        data += encoder.finish(context.usage(), context.extras())
                        await self._adapter.on_complete(encoder, context.client)
                if data:
                    await sender.send_events(data, last=not num_unfinished)

    async def _aggregate(
        self, context: RequestContext, response: HttpResponse, plan: GenerationPlan, aggregator: AnswerBuilder
    ) -> None:
        candidates: list[ChoiceDelta] = []
        add = aggregator.push if plan.candidates == plan.keep else candidates.append
        async with aclosing(self._deltas(context, response)) as deltas:
            async for delta in deltas:
                add(delta)
        for delta in pick_best_of(candidates, plan, lambda index: context.choices[index].mean_logprob):
            aggregator.push(delta)
        body = aggregator.body(context.usage(), context.extras())
        await self._adapter.on_complete(aggregator, context.client)
        response.send_json(200, body, context.served_by())

    async def _fail(self, error: DynamoError, response: HttpResponse, context: RequestContext) -> None:
        """Send the error as HTTP status, or as the last event of a started stream, or log it after the last."""
        if response.ended:
            log.info("a request failed after its complete response: %s", error)
        elif context.builder is not None and context.is_streamed and response.started:
            await response.send_events(context.builder.error(error), last=True)
        else:
            is_overloaded = isinstance(error, Overloaded)
            response.send_error(error, self._app_state.limiter.retry_after_s() if is_overloaded else RETRY_AFTER_S)


def _start(context: RequestContext, response: HttpResponse, encoder: AnswerBuilder) -> None:
    """Send what precedes the first delta. The headers may have been sent during a silence."""
    context.has_begun = True
    if not response.started:
        response.start_events(context.served_by())
    if data := encoder.start():
        response.write(data)
