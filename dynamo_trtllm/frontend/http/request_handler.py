"""Serve a generating endpoint: admit a request, read its body, run its choices, and answer in every case."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol

import msgspec

from dynamo_trtllm.api.common import ResponseMeta, Stats
from dynamo_trtllm.api.request_model import parse
from dynamo_trtllm.background import in_thread
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DeadlineExceeded, DynamoError, InvalidRequest, Overloaded, StreamIncomplete
from dynamo_trtllm.frontend.fleet.model_registry import ModelRegistry
from dynamo_trtllm.frontend.generation.choice import ChoiceDelta, Usage
from dynamo_trtllm.frontend.generation.pipeline import Pipeline
from dynamo_trtllm.frontend.generation.preprocess import (
    B,
    ChoiceRequest,
    GenerationPlan,
    PreparedRequest,
    RequestContext,
)
from dynamo_trtllm.frontend.http.admission import BodyBudget, ConcurrencyLimiter, InFlight, check_json, read_body
from dynamo_trtllm.frontend.http.request_context import ChoiceMetrics, RequestMetrics
from dynamo_trtllm.http_server.errors import RETRY_AFTER_S, internal
from dynamo_trtllm.http_server.exchange import ClientDisconnected, HttpRequest, HttpResponse
from dynamo_trtllm.messages import Chunk
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.streams import run_stream
from dynamo_trtllm.tokenization.base import ServedModel

log = logging.getLogger(__name__)

MAX_PENDING_TOKENS = 262_144  # per choice, for a client that reads slowly
THREAD_BYTES = 16 << 10  # larger bodies are parsed and rendered in a thread, so that they delay no other stream
_LARGE_AT_ONCE = min(4, os.cpu_count() or 1)  # limit of such bodies that are processed at the same time


class SseEncoder(Protocol):
    """An encoder of one streamed response as server-sent events. Pure: it returns bytes and sends nothing."""

    def start(self) -> bytes:
        """Return the events before the first delta. Called once, right before it."""
        ...

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Return the events of one choice's delta, b"" for an empty delta. `delta.finish` ends the choice."""
        ...

    def finish(self, usage: Usage, stats: Stats | None) -> bytes:
        """Return the last events of the stream: totals if the client asked for them, and the end mark."""
        ...

    def error(self, error: DynamoError) -> bytes:
        """Return the events that end a stream with an error after its headers were sent."""
        ...


class Aggregator(Protocol):
    """A builder of one complete response from deltas."""

    def push(self, delta: ChoiceDelta) -> object: ...

    def body(self, usage: Usage, stats: Stats | None) -> dict[str, Any]:
        """Return the response body. Called once, after each choice's delta with `finish`."""
        ...


class ApiAdapter(Protocol[B]):
    """One generating endpoint of the API."""

    @property
    def endpoint(self) -> str:
        """The value of the metric label `endpoint`."""
        ...

    @property
    def id_prefix(self) -> str: ...

    @property
    def body(self) -> type[B]: ...

    @property
    def prompt(self) -> frozenset[str]:
        """The body's fields that are not needed any more after planning."""
        ...

    async def plan(self, body: B, served: ServedModel, context: RequestContext, *, off_loop: bool) -> GenerationPlan:
        """Plan the request. With `off_loop` the body is large and the work is done in a thread.

        Raises:
            RequestError: the request is wrong or not supported.
        """
        ...

    def encoder(self, prepared: PreparedRequest[B]) -> SseEncoder: ...

    def aggregator(self, prepared: PreparedRequest[B]) -> Aggregator: ...

    async def on_complete(self, prepared: PreparedRequest[B], answer: Any) -> None:
        """Handle a complete response before its last part is sent. `answer`: what `encoder` or `aggregator` gave."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """The objects that all requests share."""

    config: FrontendConfig
    models: ModelRegistry
    pipeline: Pipeline
    metrics: FrontendMetrics
    limiter: ConcurrencyLimiter
    body_budget: BodyBudget
    running: InFlight
    large_bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LARGE_AT_ONCE))


class GenerateEndpoint(Generic[B]):
    """The handler of one API adapter's requests."""

    def __init__(self, adapter: ApiAdapter[B], app_state: AppState) -> None:
        self._adapter = adapter
        self._app_state = app_state

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer the request in every case. A disconnect cancels this task. Raises ClientDisconnected."""
        response.cancel_on_disconnect()
        metrics, engine_id = self._app_state.metrics, _engine_id(request)
        wants_stats = request.header(b"x-dynamo-stats") == "1"
        request_metrics = RequestMetrics(
            metrics, self._adapter.endpoint, engine_id, path=request.path, wants_stats=wants_stats
        )
        handler = RequestHandler(self._adapter, self._app_state, response, request_metrics)
        metrics.request_started()
        outcome: str | DynamoError = "cancelled"
        try:
            await self._run(handler, request, engine_id)
            outcome = "ok"
        except DynamoError as error:
            outcome = error
            await handler.fail(error)
        except MemoryError:
            # A traceback would take more memory.
            log.error("request %s failed: out of memory; lower --max-total-body-bytes", engine_id)
            outcome = Overloaded("the server is out of memory for this request; try again later or send a shorter one")
            await handler.fail(outcome)
        except ClientDisconnected:
            raise
        except Exception:  # any bug: logged here, answered as `internal`
            log.exception("request %s failed", engine_id)
            outcome = internal()
            await handler.fail(outcome)
        finally:
            handler.release()
            request_metrics.write(outcome, response.status)
            # An error refers to this frame. If the frame also referred to it, the cycle would keep the body in memory.
            del outcome

    async def _run(self, handler: RequestHandler[B], request: HttpRequest, engine_id: str) -> None:
        handler.admit()
        check_json(request)
        config = self._app_state.config
        handler.raw_body = await read_body(
            request, config.max_body_bytes, config.receive_timeout_s, handler.reserve_bytes
        )
        await handler.serve(engine_id, request.client)


class RequestHandler(Generic[B]):
    """A handler of one request, from its body to the end of the response."""

    def __init__(
        self, adapter: ApiAdapter[B], app_state: AppState, response: HttpResponse, request_metrics: RequestMetrics
    ) -> None:
        self._adapter = adapter
        self._app_state = app_state
        self._response = response
        self._request_metrics = request_metrics
        self._encoder: SseEncoder | None = None
        self._num_admitted = 0
        self._num_pending = 0  # tokens in deltas that wait to be sent, and these deltas
        self._is_sending = False  # a delta that has waited is being sent
        self._body_bytes = app_state.body_budget.body()
        self._arrived_at = time.time()
        self.raw_body = b""  # the body, until it is parsed

    async def serve(self, request_id: str, client: str) -> None:
        """Send the response. Raises any error; the caller then reports it to the client with `fail`."""
        prepared = await self._prepare(request_id, client)
        if prepared.body.stream:
            self._encoder = self._adapter.encoder(prepared)
        with self._app_state.running.track(prepared.meta.id):
            async with aclosing(self._deltas(prepared.plan)) as stream:
                if self._encoder is not None:
                    await self._stream(prepared, stream, self._encoder)
                else:
                    await self._aggregate(prepared, stream)

    async def fail(self, error: DynamoError) -> None:
        """Send the error as HTTP status, or as the last event of a started stream, or log it after the last."""
        if self._response.ended:
            log.info("a request failed after its complete response: %s", error)
        elif self._encoder is not None and self._response.started:
            await self._response.send_events(self._encoder.error(error), last=True)
        else:
            is_overloaded = isinstance(error, Overloaded)
            self._response.send_error(
                error, self._app_state.limiter.retry_after_s() if is_overloaded else RETRY_AFTER_S
            )

    def admit(self) -> None:
        """Raise Overloaded if the queue is full. Called before the body is read."""
        self._app_state.limiter.check()

    async def reserve_bytes(self, count: int) -> None:
        """Reserve budget for `count` more bytes of the body. Raises Overloaded."""
        await self._app_state.body_budget.acquire(count, self._body_bytes)

    def release(self) -> None:
        """Release all permits and bytes of the request."""
        self._drop_body()
        self._app_state.limiter.release(self._num_admitted)
        self._num_admitted = 0

    def _drop_body(self) -> None:
        self.raw_body = b""
        self._app_state.body_budget.release(self._body_bytes)

    async def _prepare(self, request_id: str, client: str) -> PreparedRequest[B]:
        """Parse and plan the request and wait for its permits. The body's memory is freed before the wait."""
        adapter, off_loop = self._adapter, len(self.raw_body) > THREAD_BYTES
        async with self._large_body_slot() if off_loop else nullcontext():
            if off_loop:
                body = await in_thread(parse, adapter.body, self.raw_body)
            else:
                body = parse(adapter.body, self.raw_body)
            max_s = self._app_state.config.request_timeout_s
            deadline = self._arrived_at + (max_s if body.timeout is None else min(body.timeout, max_s))
            self._response.deadline = deadline
            context = RequestContext(request_id=request_id, deadline=deadline)
            plan = await adapter.plan(body, self._app_state.models.get(body.model), context, off_loop=off_loop)
            body = body.model_copy(update=dict.fromkeys(adapter.prompt))
            self._drop_body()
        self._request_metrics.set_plan(plan)
        await self._acquire(len(plan.choices), deadline)
        answer_id = self._request_metrics.answer_id = adapter.id_prefix + secrets.token_hex(16)
        meta = ResponseMeta(id=answer_id, model=body.model, created=int(time.time()), client=client)
        return PreparedRequest(meta=meta, body=body, plan=plan)

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

    async def _acquire(self, count: int, deadline: float) -> None:
        limit = self._app_state.limiter.limit
        if count > limit:
            raise InvalidRequest(f"the request has {count} choices; this server runs at most {limit} at once, lower n")
        with self._request_metrics.measure_queue():
            await self._app_state.limiter.acquire(count, deadline - time.time())
        self._num_admitted = count

    async def _deltas(self, plan: GenerationPlan) -> AsyncGenerator[ChoiceDelta, None]:
        """Run all choices. Yield their deltas that were not written at once; the first error ends all choices."""
        arrived: asyncio.Queue[ChoiceDelta | asyncio.Task[None]] = asyncio.Queue()  # `_generate` bounds it
        tasks = [
            asyncio.create_task(self._generate(choice_request, choice, arrived), name=f"choice-{index}")
            for index, (choice_request, choice) in enumerate(
                zip(plan.choices, self._request_metrics.choices, strict=True)
            )
        ]
        for task in tasks:
            task.add_done_callback(arrived.put_nowait)  # after all its deltas
        item: ChoiceDelta | asyncio.Task[None] | None = None
        try:
            running = len(tasks)
            while running:
                item = await arrived.get()
                if isinstance(item, ChoiceDelta):
                    self._num_pending -= item.tokens + 1
                    self._is_sending = True
                    yield item
                    self._is_sending = False
                else:
                    item.result()
                    running -= 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # An error refers to this frame and its task to the error. Such a cycle would keep the body in memory.
            while not arrived.empty():
                arrived.get_nowait()
            del tasks, task, item, arrived

    async def _generate(
        self,
        choice_request: ChoiceRequest,
        choice: ChoiceMetrics,
        arrived: asyncio.Queue[ChoiceDelta | asyncio.Task[None]],
    ) -> None:
        """Run one choice. Each of its deltas is written within the call that has its tokens, or put into `arrived`.

        It is put there while the client reads slowly, behind earlier ones, and if it is the first or the last.

        Raises:
            Overloaded: the client reads too slowly.
            StreamIncomplete: the workers' stream had no end.
        """
        detokenize, write, has_ended = choice.detokenizer.push, self._direct_write(), False

        def on_chunk(chunk: Chunk) -> bool:
            nonlocal has_ended
            delta = detokenize(chunk)
            has_ended = delta.finish is not None
            if not (write is not None and not has_ended and arrived.empty() and write(delta)):
                self._num_pending += delta.tokens + 1
                limit = MAX_PENDING_TOKENS * len(self._request_metrics.choices)
                if self._num_pending > limit:
                    raise Overloaded(f"the client reads too slowly: over {limit} tokens are pending")
                arrived.put_nowait(delta)
            return not has_ended

        start = partial(self._app_state.pipeline.generate, choice_request.request, choice.trace)
        await run_stream(start, on_chunk)
        if not has_ended:
            raise StreamIncomplete("the worker's stream ended without a terminal chunk; retry")

    def _direct_write(self) -> Callable[[ChoiceDelta], bool] | None:
        """Return a function that writes a delta's events at once, without a task switch; None if nothing is streamed.

        It returns False, and writes nothing, before the stream has started and while the client reads slowly.
        """
        response, encoder = self._response, self._encoder
        if encoder is None:
            return None
        observe, encode, send = self._request_metrics.observe, encoder.delta, response.write

        def write(delta: ChoiceDelta) -> bool:
            if self._is_sending or not response.is_writable:
                return False
            observe(delta)
            if data := encode(delta):
                send(data)
            return True

        return write

    async def _stream(
        self, prepared: PreparedRequest[B], stream: AsyncGenerator[ChoiceDelta, None], encoder: SseEncoder
    ) -> None:
        request_metrics, response, num_unfinished = self._request_metrics, self._response, prepared.answers
        async for delta in stream:
            request_metrics.observe(delta)
            if response.started:
                data = encoder.delta(delta)
            else:
                data = encoder.start() + encoder.delta(delta)
                response.start_events(request_metrics.served_by())
            if delta.finish is not None:
                num_unfinished -= 1
                if not num_unfinished:
                    data += encoder.finish(request_metrics.usage(), request_metrics.stats())
                    await self._adapter.on_complete(prepared, encoder)
            if data:
                await response.send_events(data, last=not num_unfinished)

    async def _aggregate(self, prepared: PreparedRequest[B], stream: AsyncGenerator[ChoiceDelta, None]) -> None:
        aggregator, request_metrics, plan = self._adapter.aggregator(prepared), self._request_metrics, prepared.plan
        candidates: list[ChoiceDelta] = []
        add = aggregator.push if plan.candidates == plan.keep else candidates.append
        async for delta in stream:
            request_metrics.observe(delta)
            add(delta)
        for delta in pick_best_of(candidates, plan, request_metrics.likelihood):
            aggregator.push(delta)
        body = aggregator.body(request_metrics.usage(), request_metrics.stats())
        await self._adapter.on_complete(prepared, aggregator)
        self._response.send_json(200, body, request_metrics.served_by())


def pick_best_of(
    deltas: Sequence[ChoiceDelta], plan: GenerationPlan, likelihood: Callable[[int], float]
) -> Iterator[ChoiceDelta]:
    """Yield the deltas of each prompt's `keep` likeliest candidates, best first and renumbered.

    `likelihood` returns that of the candidate at an index of the plan.
    """
    by_candidate: list[list[ChoiceDelta]] = [[] for _ in plan.choices]
    for delta in deltas:
        by_candidate[delta.index].append(delta)
    answers = itertools.count()
    for first in range(0, len(by_candidate), plan.candidates):
        ranked = sorted(range(first, first + plan.candidates), key=likelihood, reverse=True)
        for candidate in ranked[: plan.keep]:
            index = next(answers)
            for delta in by_candidate[candidate]:
                yield msgspec.structs.replace(delta, index=index)


def _engine_id(request: HttpRequest) -> str:
    """Return a request id that starts with the client's id and is unique even if clients repeat theirs."""
    unique = secrets.token_hex(8)
    return f"{request.id}-{unique}" if request.id else unique
