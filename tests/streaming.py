"""Lets engines and services of tests write their streams as async generators."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from dynamo_trtllm.messages import Chunk, GenerateRequest
from dynamo_trtllm.streams import ChunkStream, KvHolder, OnEvent, StreamHandle


class ChunkSource(ABC):
    """A `Generator` whose subclass defines the chunks of a request."""

    kv_holder: KvHolder | None = None

    @abstractmethod
    def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]: ...

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        tasks: set[asyncio.Task[None]] = set()
        return ChunkStream(self.chunks(request), on_event, tasks, f"stream-{request.request_id}", self.kv_holder)
