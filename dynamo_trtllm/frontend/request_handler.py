"""One generation, from body to last byte: parse, plan, run all choices, answer.

Headers leave only after the first piece came, so that every earlier error has its own status.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Generic

import msgspec

from dynamo_trtllm.api.request_model import parse
from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.errors import DeadlineExceeded, DynamoError, InvalidRequest, Overloaded
from dynamo_trtllm.frontend.admission import BodyBudget, ConcurrencyLimiter, InFlight, in_thread
from dynamo_trtllm.frontend.api_adapter import ApiAdapter, B, PreparedRequest, ResponseMeta, SseEncoder
from dynamo_trtllm.frontend.base import Generator, ModelCatalog
from dynamo_trtllm.frontend.detokenizer import ChoiceDelta, detokenize_stream
from dynamo_trtllm.frontend.http import ClientDisconnected, ClientResponse
from dynamo_trtllm.frontend.preprocess import ChoiceRequest, GenerationPlan, RequestContext
from dynamo_trtllm.frontend.request_metrics import RequestMetrics
from dynamo_trtllm.http_server.errors import RETRY_AFTER_S
from dynamo_trtllm.messages import Chunk
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.request_plane.base import Sink

AHEAD = 16  # pieces per choice that wait for a client that reads slowly; then the choices wait

Pieces = AsyncGenerator[ChoiceDelta, None]


async def merge_streams(streams: Sequence[Pieces]) -> Pieces:
    """Pieces as they come. The first error of a stream ends all and is raised; closing closes all."""
    came: asyncio.Queue[ChoiceDelta | asyncio.Task[None]] = asyncio.Queue()
    slots = asyncio.Semaphore(AHEAD * len(streams))

    async def pump(stream: Pieces) -> None:
        async with aclosing(stream):
            async for piece in stream:
                await slots.acquire()
                came.put_nowait(piece)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(came.put_nowait)  # behind all its pieces
    try:
        running = len(tasks)
        while running:
            item = await came.get()
            if isinstance(item, ChoiceDelta):
                slots.release()
                yield item
            else:
                item.result()
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pick_best_of(
    pieces: Sequence[ChoiceDelta], plan: GenerationPlan, likelihood: Callable[[int], float]
) -> Iterator[ChoiceDelta]:
    """Of the pieces of all candidates those of each prompt's `keep` likeliest, best first and numbered anew.

    `likelihood`: of the candidate at this place of the plan.
    """
    of: list[list[ChoiceDelta]] = [[] for _ in plan.choices]
    for piece in pieces:
        of[piece.index].append(piece)
    answers = itertools.count()
    for first in range(0, len(of), plan.candidates):
        ranked = sorted(range(first, first + plan.candidates), key=likelihood, reverse=True)
        for candidate in ranked[: plan.keep]:
            index = next(answers)
            for piece in of[candidate]:
                yield msgspec.structs.replace(piece, index=index)


THREAD_BYTES = 16 << 10  # larger bodies are parsed and rendered in a thread, so as not to delay other streams
_LARGE_AT_ONCE = min(4, os.cpu_count() or 1)  # such bodies that are parsed and rendered at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """What all exchanges share."""

    config: FrontendConfig
    models: ModelCatalog
    pipeline: Generator
    metrics: FrontendMetrics
    permits: ConcurrencyLimiter
    bodies: BodyBudget
    running: InFlight
    large_bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LARGE_AT_ONCE))


class RequestHandler(Generic[B]):
    """The state of one exchange."""

    def __init__(self, dialect: ApiAdapter[B], edge: AppState, reply: ClientResponse, record: RequestMetrics) -> None:
        self._dialect = dialect
        self._edge = edge
        self._reply = reply
        self._record = record
        self._events: SseEncoder | None = None
        self._permits = 0
        self._body_bytes = edge.bodies.body()
        self._arrived_at = time.time()
        self.raw = b""  # the body, until it is parsed

    async def serve(self, request_id: str, client: str) -> None:
        """Sends the whole answer. Raises what kept it from that; `fail` tells the client then."""
        job = await self._job(request_id, client)
        if job.body.stream:
            self._events = self._dialect.events(job)
        with self._edge.running.entered(job.heading.id):
            async with aclosing(self._pieces(job.plan)) as stream:
                if self._events is not None:
                    await self._streamed(job, stream, self._events)
                else:
                    await self._folded(job, stream)

    def is_answered(self) -> bool:
        """All was sent."""
        return self._reply.ended

    async def fail(self, error: DynamoError) -> None:
        """Send the error as HTTP status, or as last event of a started stream. Do nothing if the client is gone."""
        with suppress(ClientDisconnected):
            if self._events is not None and self._reply.started:
                await self._reply.events(self._events.failure(error), last=True)
            else:
                crowded = isinstance(error, Overloaded)
                await self._reply.fail(error, self._edge.permits.retry_after_s() if crowded else RETRY_AFTER_S)

    def admit(self) -> None:
        """Before anything is read. Raises Overloaded when this request could not even wait for its turn."""
        self._edge.permits.check()

    async def take_bytes(self, count: int) -> None:
        """Reserve budget for this many more bytes of the body. Raises Overloaded."""
        await self._edge.bodies.take(count, self._body_bytes)

    def leave(self) -> None:
        """Give all permits and bytes back."""
        self._drop_body()
        self._edge.permits.give_back(self._permits)
        self._permits = 0

    def _drop_body(self) -> None:
        self.raw = b""
        self._edge.bodies.give_back(self._body_bytes)

    async def _job(self, request_id: str, client: str) -> PreparedRequest[B]:
        """Return when it is this request's turn. By then the body's bytes and texts are freed."""
        dialect, off_loop = self._dialect, len(self.raw) > THREAD_BYTES
        async with self._large_turn() if off_loop else nullcontext():
            if off_loop:
                body = await in_thread(parse, dialect.body, self.raw)
            else:
                body = parse(dialect.body, self.raw)
            most_s = self._edge.config.request_timeout_s
            deadline = self._arrived_at + (most_s if body.timeout is None else min(body.timeout, most_s))
            self._reply.deadline = deadline
            identity = RequestContext(request_id=request_id, deadline=deadline)
            plan = await dialect.plan(body, self._edge.models.get(body.model), identity, off_loop=off_loop)
            body = body.model_copy(update=dict.fromkeys(dialect.prompt))
            self._drop_body()
        self._record.planned(plan)
        await self._turn(len(plan.choices), deadline)
        answer_id = self._record.answer_id = dialect.id_prefix + secrets.token_hex(16)
        heading = ResponseMeta(id=answer_id, model=body.model, created=int(time.time()), client=client)
        return PreparedRequest(heading=heading, body=body, plan=plan)

    @asynccontextmanager
    async def _large_turn(self) -> AsyncGenerator[None, None]:
        """Limit how many large bodies are processed at once: each takes several times its size in memory meanwhile.

        Raises:
            DeadlineExceeded: the bodies before this one took too long.
        """
        try:
            async with asyncio.timeout(self._edge.config.request_timeout_s):
                await self._edge.large_bodies.acquire()
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while other large requests were parsed") from None
        try:
            yield
        finally:
            self._edge.large_bodies.release()

    async def _turn(self, count: int, deadline: float) -> None:
        limit = self._edge.permits.limit
        if count > limit:
            raise InvalidRequest(f"the request has {count} choices in all; this server runs at most {limit} at once")
        with self._record.queueing():
            await self._edge.permits.take(count, deadline - time.time())
        self._permits = count

    def _pieces(self, plan: GenerationPlan) -> AsyncGenerator[ChoiceDelta, None]:
        """Of all choices that are answered, however many."""
        generate = self._edge.pipeline.generate
        if len(plan.choices) == 1 and (sink := self._sink(plan.choices[0])) is not None:
            course = self._record.courses[0]
            return detokenize_stream(generate(plan.choices[0].request, course.trace, sink), course.output)
        streams = [
            detokenize_stream(generate(prepared.request, course.trace), course.output)
            for prepared, course in zip(plan.choices, self._record.courses, strict=True)
        ]
        return streams[0] if len(streams) == 1 else merge_streams(streams)

    def _sink(self, prepared: ChoiceRequest) -> Sink | None:
        """Sends the only choice's events within the step that made them, while the client keeps up: most take this
        way. What it does not take, the beginning and the end go through `_streamed`. None: all must."""
        writer, events = self._reply.writer, self._events
        if writer is None or events is None or not prepared.ends_with_engine:
            return None
        push, tick, event = self._record.courses[0].output.push, self._record.tick, events.piece
        is_ready, write = writer.is_ready, writer.write

        def sink(chunk: Chunk) -> bool:
            if not is_ready():
                return False
            piece = push(chunk)
            tick(piece)
            if data := event(piece):
                write(data)
            return True

        return sink

    async def _streamed(
        self, job: PreparedRequest[B], stream: AsyncGenerator[ChoiceDelta, None], events: SseEncoder
    ) -> None:
        record, reply, left = self._record, self._reply, job.answers
        async for piece in stream:
            record.tick(piece)
            if reply.started:
                data = events.piece(piece)
            else:
                data = events.opening() + events.piece(piece)
                await reply.start_events(record.served_by())
            if piece.finish is not None:
                left -= 1
                if not left:
                    data += events.closing(record.usage(), record.stats())
                    await self._dialect.finished(job, events)
            if data:
                await reply.events(data, last=not left)

    async def _folded(self, job: PreparedRequest[B], stream: AsyncGenerator[ChoiceDelta, None]) -> None:
        fold, record, plan = self._dialect.fold(job), self._record, job.plan
        candidates: list[ChoiceDelta] = []
        take = fold.push if plan.candidates == plan.keep else candidates.append
        async for piece in stream:
            record.tick(piece)
            take(piece)
        for piece in pick_best_of(candidates, plan, record.likelihood):
            fold.push(piece)
        body = fold.body(record.usage(), record.stats())
        await self._dialect.finished(job, fold)
        await self._reply.json(200, body, record.served_by())
