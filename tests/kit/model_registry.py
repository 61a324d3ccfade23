"""Runs workers that only send model files, and a `ModelRegistry` that watches them, in one
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from dynamo_trtllm.cluster.discovery.discovery_interface import Registration
from dynamo_trtllm.cluster.discovery.memory import InstanceRecords, MemoryDiscovery
from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.cluster.request_plane.transport import Service
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry, RegistryTiming
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    FileChunk,
    GenerateRequest,
    GetFile,
    ModelDeploymentCard,
    Role,
    decode,
    encode,
)
from dynamo_trtllm.protocol.streams import OnEvent, StreamHandle
from dynamo_trtllm.worker.card import digest
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.generator_streams import ChunkEngine
from tests.kit.instances import CARD, make_instance
from tests.kit.waiting import SOON_S

HARMONY = ModelDeploymentCard(
    name="oss", context_length=128, vocab_size=32, eos_token_ids=(2,), renderer="harmony"
)
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


class NoEngine(ChunkEngine):
    """An engine that must not be used, because the workers of these tests only send files."""

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise AssertionError("the workers of these tests only send files")
        yield Chunk()


class FileService:
    """A worker's service that records the requested chunks of files, and may corrupt them."""

    def __init__(self, files: Mapping[str, Path], *, garbled: bool = False) -> None:
        instance = make_instance(1, role=Role.AGGREGATED)
        self._service = WorkerService(
            NoEngine(), instance, WorkerAdmission(), files=files, metrics=WorkerMetrics()
        )
        self.garbled = garbled
        self.asked: list[GetFile] = []

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        return self._service.generate(request, on_event)

    async def control(self, verb: Control) -> bytes:
        assert isinstance(verb, GetFile)
        self.asked.append(verb)
        reply = await self._service.control(verb)
        if not self.garbled:
            return reply
        region = decode(reply, FileChunk)
        return encode(FileChunk(data=b"?" * len(region.data), total_bytes=region.total_bytes))


class Frontend:
    """A `ModelRegistry` with in-process discovery and request plane."""

    def __init__(self, timing: RegistryTiming) -> None:
        self.plane = InprocPlane()
        self.store = InstanceRecords()
        self.discovery = MemoryDiscovery(self.store)
        self.models = ModelRegistry(
            ClusterView(), self.discovery, self.plane, "dynamo", None, timing
        )
        self.watching = asyncio.create_task(self.models.watch())

    async def add(
        self,
        instance_id: int,
        card: ModelDeploymentCard,
        role: Role = Role.AGGREGATED,
        service: Service | None = None,
    ) -> Registration:
        instance = msgspec.structs.replace(make_instance(instance_id, role=role), card=card)
        if service is not None:
            await self.plane.serve(instance.subject, service)
        return await self.discovery.register(instance)

    async def aclose(self) -> None:
        self.watching.cancel()
        with suppress(asyncio.CancelledError):
            await self.watching
        await self.models.aclose()
        await self.discovery.aclose()
        await self.plane.aclose()


def card_of(files: Mapping[str, Path]) -> ModelDeploymentCard:
    return msgspec.structs.replace(CARD, files={name: digest(path) for name, path in files.items()})


def by_hash(files: Mapping[str, Path]) -> dict[str, Path]:
    return {digest(path): path for path in files.values()}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - conditions have no event
            await asyncio.sleep(0.002)


async def wait_served(frontend: Frontend, name: str) -> None:
    await until(lambda: name in frontend.models.names())
