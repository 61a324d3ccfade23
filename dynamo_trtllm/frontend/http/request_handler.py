"""Serve a generating endpoint: admit a request, read its body, run its choices, and answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeAlias

import orjson
from msgspec.structs import replace

from dynamo_trtllm.api.response_schemas import ResponseMeta
from dynamo_trtllm.api.unknown_fields import collector
from dynamo_trtllm.background import in_thread
from dynamo_trtllm.errors import Cancelled, DynamoError, InvalidRequest
from dynamo_trtllm.frontend.generation.choice import ChoiceDelta, pick_best_of
from dynamo_trtllm.frontend.generation.completions import CompletionBuilder
from dynamo_trtllm.frontend.generation.messages.message_builder import MessageBuilder
from dynamo_trtllm.frontend.generation.preprocess import B, GenerationPlan
from dynamo_trtllm.frontend.generation.responses.response_builder import ResponseBuilder
from dynamo_trtllm.frontend.http.endpoint import Endpoint, is_large_body
from dynamo_trtllm.frontend.http.request_context import AppState, RequestContext
from dynamo_trtllm.frontend.requests.admission import check_json
from dynamo_trtllm.frontend.requests.keep_alive import COMMENT, KeepAlive
from dynamo_trtllm.frontend.requests.output_budget import (
    COUNTED_TOKENS,
    TOKEN_BYTES,
    Output,
    check_answer,
    scored_tokens,
)
from dynamo_trtllm.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.messages import GenerateRequest
from dynamo_trtllm.tokenization.served_model import ServedModel

log = logging.getLogger(__name__)

_INLINE_OUTPUT_BYTES = 256 << 10  # larger answers are encoded in a thread
_MAX_SESSION_ID = 256


AnswerBuilder: TypeAlias = CompletionBuilder | ResponseBuilder | MessageBuilder


class ApiAdapter(Protocol[B]):
    """One generating endpoint of the API."""

    endpoint: str  # the value of the metric label `endpoint`
    id_prefix: str
    body: type[B]
    prompt: frozenset[str]  # the body's fields that are not needed any more after planning
    ping: bytes  # the event of a silent stream; b"": a comment

    async def resolve(
        self, body: B, served: ServedModel, call: GenerateRequest
    ) -> tuple[Callable[[], GenerationPlan], int]:
        """Read what the request refers to. Raises RequestError.

        Args:
            call: that of the body, without prompt and sampling values.

        Returns:
            The work that plans the request, and the characters of stored text that it renders.
            The work may take long, is safe in a thread, and raises RequestError if the request is
            wrong or not supported.
        """

    def builder(self, meta: ResponseMeta, body: B, plan: GenerationPlan) -> AnswerBuilder:
        """Return the encoder of the events of a streamed response, otherwise its aggregator."""

    async def on_complete(self, answer: Any, client: str) -> None:
        """Handle a complete response before its last part is sent.

        Args:
            answer: what `builder` returned.
            client: the client's network address; "" if unknown.
        """


def _session_id(request: HttpRequest) -> str:
    """Return the conversation of a request as its header names it; "" without one.

    Raises InvalidRequest.
    """
    session_id = (request.header(b"x-session-id") or "").strip()
    if len(session_id) > _MAX_SESSION_ID:
        raise InvalidRequest(
            f"X-Session-ID has {len(session_id)} characters; at most {_MAX_SESSION_ID} are allowed"
        )
    return session_id


class GenerateEndpoint(Endpoint, Generic[B]):
    """The handler of one API adapter's requests."""

    def __init__(self, adapter: ApiAdapter[B], app_state: AppState) -> None:
        super().__init__(adapter.endpoint, app_state)
        self._adapter = adapter

    async def _serve(
        self, context: RequestContext, request: HttpRequest, response: HttpResponse
    ) -> None:
        """Send the response.

        Raises any error; the caller then reports it to the client with `_fail`.
        """
        adapter = self._adapter
        self._app_state.limiter.check(context.client)
        check_json(request)
        body, plan = await self._plan(context, request)
        context.release_body()
        response.deadline = context.deadline
        if not body.stream:
            check_answer(plan)
        context.accept(plan, adapter.id_prefix)
        meta = ResponseMeta(
            id=context.answer_id,
            model=body.model,
            created=int(time.time()),
            request_id=response.request_id,
        )
        context.is_streamed = body.stream
        context.builder = adapter.builder(meta, body, plan)
        seconds = self._app_state.config.sse_keep_alive_s
        if body.stream and seconds:
            context.keep_alive = KeepAlive(
                response, seconds, context.received_s, context.served_by, adapter.ping or COMMENT
            )
        await context.acquire_permits()
        async with self._choices_turn(len(plan.choices)):
            context.create_choices(plan)
        task = asyncio.current_task()
        running = self._app_state.running
        assert task is not None
        running[context.answer_id] = (context, task)
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

    async def _plan(
        self, context: RequestContext, request: HttpRequest
    ) -> tuple[B, GenerationPlan]:
        """Read the body, parse it and plan the request.

        The returned body has no prompt, to free its memory.
        """
        adapter = self._adapter
        raw_body = await context.read_body(request)
        unknown_fields = self._app_state.config.unknown_fields
        ignored = collector(unknown_fields)
        is_large = is_large_body(raw_body)
        async with self._slot(is_large=is_large):
            context.enter("tokenize")
            body = await self._parse(adapter.body, raw_body, ignored, is_large=is_large)
            context.set_timeout(body.timeout)
            context.extra_fields = frozenset(body.nvext.extra_fields)
            served = self._app_state.models.get(body.model)
            context.enter("load")
            call = body.call(context.id, context.deadline, _session_id(request))
            if context.traceparent is not None:
                call = replace(call, traceparent=context.traceparent)
            prepare, stored_chars = await adapter.resolve(body, served, call)
            size = max(len(raw_body), stored_chars)
            plan = await self._tokenize(
                context, served, prepare, size, is_large=is_large, num_choices=body.num_choices
            )
            if unknown_fields != "ignore":
                context.report_ignored([*(ignored or ()), *plan.ignored], request)
            without_prompt = body.model_copy(update=dict.fromkeys(adapter.prompt))
            return without_prompt, plan

    async def _stream(
        self, context: RequestContext, response: HttpResponse, encoder: AnswerBuilder
    ) -> None:
        # All choices are returned, because `best_of` is rejected with `stream`.
        num_unfinished = len(context.choices)
        sender = context.keep_alive or response
        async with aclosing(_deltas(context, response)) as deltas:
            async for delta in deltas:
                if not context.has_begun:
                    _start(context, response, encoder)
                data = encoder.delta(delta)
                if delta.finish is not None:
                    num_unfinished -= 1
                    if not num_unfinished:
                        async with self._app_state.ending_time.turn():
                            data += encoder.finish(context.usage(), context.extras())
                        await self._adapter.on_complete(encoder, context.client)
                if data:
                    await sender.send_events(data, last=not num_unfinished)

    async def _aggregate(
        self,
        context: RequestContext,
        response: HttpResponse,
        plan: GenerationPlan,
        aggregator: AnswerBuilder,
    ) -> None:
        # If the best candidates are to be picked, all deltas wait for that.
        candidates: list[ChoiceDelta] = []
        add = aggregator.push if plan.candidates == plan.keep else candidates.append
        async with aclosing(_deltas(context, response)) as deltas:
            async for delta in deltas:
                add(delta)

        def likelihood(index: int) -> float:
            return context.choices[index].mean_logprob

        for delta in pick_best_of(candidates, plan, likelihood):
            aggregator.push(delta)

        def encode() -> bytes:
            return orjson.dumps(aggregator.body(context.usage(), context.extras()))

        if context.output_bytes > _INLINE_OUTPUT_BYTES:
            async with self._slot(is_large=True):
                body = await in_thread(encode)
        else:
            async with self._app_state.ending_time.turn():
                body = encode()
        await self._adapter.on_complete(aggregator, context.client)
        response.send(200, body, headers=context.served_by())

    async def _fail(
        self, error: DynamoError, response: HttpResponse, context: RequestContext
    ) -> None:
        """Send the error as HTTP status or as the last event of a started stream.

        After the end of the response, log it.
        """
        if response.ended:
            log.info("a request failed after its complete response: %s", error)
        elif context.builder is not None and context.is_streamed and response.started:
            await response.send_events(context.builder.error(error), last=True)
        else:
            await super()._fail(error, response, context)


class _UnsentDeltas:
    """The deltas of a request that wait to be sent, and the error behind them.

    `output` counts their memory. It is set before the choices start.
    """

    __slots__ = ("items", "num_counted", "num_pending", "output")

    output: Output

    def __init__(self) -> None:
        self.items: asyncio.Queue[ChoiceDelta | DynamoError] = asyncio.Queue()
        self.num_pending = 0  # in units of TOKEN_BYTES; an error counts as one
        self.num_counted = 0  # of them in `output`

    def clear(self) -> None:
        while not self.items.empty():
            self.items.get_nowait()


async def _deltas(
    context: RequestContext, response: HttpResponse
) -> AsyncGenerator[ChoiceDelta, None]:
    """Run all choices.

    Yield their deltas that were not written at once; the first error ends all choices.
    """
    waiting = _UnsentDeltas()
    deliver = _delivery(context, response, waiting)

    def end(error: DynamoError, drops_pending: bool) -> None:
        context.cancel()
        if drops_pending:
            waiting.clear()
        deliver(error)

    waiting.output = context.open_output(end)
    num_running = len(context.choices)
    item: ChoiceDelta | DynamoError | None = None
    try:
        await context.start_choices(deliver)
        while num_running:
            item = await waiting.items.get()
            if isinstance(item, DynamoError):
                raise item
            yield item
            if context.is_streamed:
                size = scored_tokens(item) if context.is_scored else item.tokens + 1
                waiting.num_pending -= size
                if waiting.num_counted and (
                    waiting.num_pending < waiting.num_counted - COUNTED_TOKENS
                ):
                    waiting.num_counted = waiting.num_pending
                    waiting.output.set(waiting.num_counted * TOKEN_BYTES)
            if item.finish is not None:
                num_running -= 1
    finally:
        waiting.num_pending += 1  # so that `deliver` writes nothing more
        await context.end_choices()
        # An error refers to this frame. If the frame also referred to it, the cycle would keep
        # the body in memory.
        item = None
        waiting.clear()


def _delivery(
    context: RequestContext, response: HttpResponse, waiting: _UnsentDeltas
) -> Callable[[ChoiceDelta | DynamoError], None]:
    """Return the function that gets the deltas of all choices.

    A delta of a stream is written within the call that has its tokens. It waits while the client
    reads slowly, behind earlier ones or an error, and if it is the last of its choice. Deltas of
    other responses always wait.

    The function runs once per token. It is a closure, because attributes of an object take 30 ns
    more per token.
    """
    encoder = context.builder if context.is_streamed else None
    write = response.write if context.keep_alive is None else context.keep_alive.write

    def deliver(item: ChoiceDelta | DynamoError) -> None:
        if not isinstance(item, ChoiceDelta):
            waiting.items.put_nowait(item)
            waiting.num_pending += 1  # no delta overtakes the error
            return
        context.observe(item)
        if item.finish is None and not waiting.num_pending and encoder is not None:
            # In a task, it would be later, and all deltas until then would wait.
            if not context.has_begun:
                _start(context, response, encoder)
            if response.is_writable:
                data = encoder.delta(item)
                if data:
                    write(data)
                return
        waiting.items.put_nowait(item)
        waiting.num_pending += scored_tokens(item) if context.is_scored else item.tokens + 1
        if waiting.num_pending > waiting.num_counted + COUNTED_TOKENS:
            waiting.num_counted = waiting.num_pending
            waiting.output.set(waiting.num_counted * TOKEN_BYTES)

    return deliver


def _start(context: RequestContext, response: HttpResponse, encoder: AnswerBuilder) -> None:
    """Send what precedes the first delta. The headers may have been sent during a silence."""
    context.has_begun = True
    if not response.started:
        response.start_events(context.served_by())
    data = encoder.start()
    if data:
        response.write(data)
