"""Lets engines and services of tests write their streams as async generators."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import cached_property, partial

from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.engines.engine_interface import Engine, EngineInfo, EngineStats
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.protocol.errors import StreamIncomplete
from dynamo_trtllm.protocol.messages import Chunk, GenerateRequest
from dynamo_trtllm.protocol.streams import (
    KvHolder,
    OnChunk,
    OnEvent,
    StreamEvent,
    StreamHandle,
    TaskStream,
    as_stream,
)


class ChunkStream(TaskStream):
    """The stream of an async generator of chunks, which a task reads."""

    __slots__ = ()

    def __init__(
        self,
        chunks: AsyncGenerator[Chunk, None],
        on_event: OnEvent,
        tasks: set[asyncio.Task[None]],
        name: str,
        kv_holder: KvHolder | None = None,
    ) -> None:
        super().__init__(on_event, tasks, kv_holder)
        self.run(self._read(chunks), name)

    async def _read(self, chunks: AsyncGenerator[Chunk, None]) -> StreamEvent | None:
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    # the end of the stream must not cancel the generator's cleanup
                    self._task = None
                    self.emit(chunk)
                    return None
                self.emit(chunk)
        return StreamIncomplete("the stream ended without a terminal chunk")


class ChunkSource(ABC):
    """A `Generator` whose subclass defines the chunks of a request."""

    kv_holder: KvHolder | None = None

    @abstractmethod
    def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]: ...

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        tasks: set[asyncio.Task[None]] = set()
        return ChunkStream(
            self.chunks(request), on_event, tasks, f"stream-{request.request_id}", self.kv_holder
        )


class ChunkEngine(ChunkSource, Engine):
    """An engine whose subclass defines the chunks of a request, and that needs no start."""

    async def start(self) -> EngineInfo:
        raise AssertionError("a service starts no engine")

    async def drain(self) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats()

    async def aclose(self) -> None:
        pass


class WorkerCalls:
    """The calls of one worker, at its subject, as a `Generator`."""

    def __init__(self, plane: RequestPlane, subject: str) -> None:
        self._plane = plane
        self._subject = subject

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        return self._plane.client.generate(self._subject, request, on_event)


def call_stream(
    plane: RequestPlane, subject: str, request: GenerateRequest
) -> AsyncGenerator[Chunk, None]:
    return as_stream(WorkerCalls(plane, subject), request)


class RouterCalls:
    """The requests of a router, as a `Generator`."""

    def __init__(self, router: RequestRouter, trace: ChoiceTimeline) -> None:
        self._router = router
        self._trace = trace

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        return self._router.generate(request, self._trace, on_event)


def routed_stream(
    router: RequestRouter, request: GenerateRequest, trace: ChoiceTimeline
) -> AsyncGenerator[Chunk, None]:
    return as_stream(RouterCalls(router, trace), request)


class PlayedRouter(ABC):
    """A router whose subclass plays a request as a coroutine."""

    placement = None  # it selects no workers

    @cached_property
    def view(self) -> ClusterView:
        return ClusterView()

    @cached_property
    def plane(self) -> RequestPlane:
        return InprocPlane()

    @abstractmethod
    async def play(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_chunk: OnChunk
    ) -> None:
        """Pass the chunks to `on_chunk`, which returns False after the last one."""

    def generate(
        self, request: GenerateRequest, trace: ChoiceTimeline, on_event: OnEvent
    ) -> StreamHandle:
        return PlayedStream(partial(self.play, request, trace), on_event, request.request_id)


class PlayedStream(TaskStream):
    __slots__ = ()

    def __init__(
        self, play: Callable[[OnChunk], Awaitable[None]], on_event: OnEvent, name: str
    ) -> None:
        super().__init__(on_event, set())
        self.run(self._play(play), name)

    async def _play(self, play: Callable[[OnChunk], Awaitable[None]]) -> StreamEvent | None:
        def on_chunk(chunk: Chunk) -> bool:
            if chunk.finish_reason is not None:
                # the end of the stream must not cancel what the coroutine does after it
                self._task = None
            self.emit(chunk)
            return not self.has_ended

        await play(on_chunk)
        return None if self.has_ended else StreamIncomplete("the script has no terminal chunk")
