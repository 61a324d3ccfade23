"""A worker that falls asleep and wakes: what it waits for, when it stays as it is, and what ends
it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.engines.capabilities import Sleeps
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.errors import Draining, EngineFailed, InternalError
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    FinishReason,
    GenerateRequest,
    Sampling,
    token_ids,
)
from dynamo_trtllm.support.background import BackgroundTasks
from dynamo_trtllm.worker.health import Health, health_app
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.started_worker import StartedWorker
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.generator_streams import ChunkEngine, call_stream
from tests.kit.instances import make_instance
from tests.kit.memory_http import asgi
from tests.kit.waiting import SOON_S

SUBJECT = "s.generate-1"


class SleepingEngine(ChunkEngine, Sleeps):
    """An engine that records its calls. While it sleeps, it can't answer."""

    def __init__(self) -> None:
        self.obstacle = ""
        self.log: list[str] = []
        self.answer = 7
        self.fault: Exception | None = None  # of the next change
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.may_change = asyncio.Event()
        self.may_change.set()

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        assert self.log[-1:] != ["sleep"]
        self.log.append(request.request_id)
        await self.may_end.wait()
        yield Chunk(token_ids=token_ids([self.answer]), finish_reason=FinishReason.LENGTH)

    async def control(self, verb: Control) -> bytes:
        raise NotImplementedError

    @property
    def sleep_obstacle(self) -> str:
        return self.obstacle

    async def sleep(self) -> None:
        await self._change("sleep")

    async def wake(self) -> None:
        await self._change("wake")

    async def _change(self, name: str) -> None:
        if self.fault is not None:
            raise self.fault
        await self.may_change.wait()
        self.log.append(name)


class Registrations:
    def __init__(self) -> None:
        self.open = 0

    async def register(self) -> Registrations:
        self.open += 1
        return self

    async def aclose(self) -> None:
        self.open = 0


class Bench:
    """A worker that is served on an in-process plane."""

    def __init__(
        self, engine: SleepingEngine, drain_timeout_s: float, timing: WorkerTiming
    ) -> None:
        self.engine = engine
        self.health = Health("serving")
        self.registered = Registrations()
        self.plane = InprocPlane()
        self._drain_timeout_s = drain_timeout_s
        self._timing = timing

    async def start(self) -> None:
        engine: Any = self.engine
        registration: Any = await self.registered.register()
        register: Any = self.registered.register
        self.tasks = BackgroundTasks()
        self.started_worker = StartedWorker(
            service=WorkerService(
                engine, make_instance(1), WorkerAdmission(), files={}, metrics=WorkerMetrics()
            ),
            server=await self.plane.serve(SUBJECT, self.engine),
            registration=registration,
            register=register,
            health=self.health,
            drain_timeout_s=self._drain_timeout_s,
            tasks=self.tasks,
            timing=self._timing,
        )

    async def post(
        self, path: str, client: str = "127.0.0.1", headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        app = health_app(
            self.health,
            bytes,
            {"/sleep": self.started_worker.sleep, "/wake": self.started_worker.wake},
        )
        transport = httpx.ASGITransport(app=asgi(app), client=(client, 9))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as http:
            answer = await http.post(path, headers=headers)
        return answer.status_code, answer.json()["reason"]

    async def until(self, phase: str) -> None:
        async with asyncio.timeout(SOON_S):
            while self.health.phase != phase:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.001)

    async def ask(self) -> list[int]:
        sampling = Sampling(max_tokens=1)
        request = GenerateRequest(
            request_id="r",
            model="m",
            token_ids=token_ids([1]),
            sampling=sampling,
            deadline=time.time() + SOON_S,
        )
        return [
            token
            async for chunk in call_stream(self.plane, SUBJECT, request)
            for token in chunk.token_ids
        ]


@asynccontextmanager
async def opened(
    drain_timeout_s: float = SOON_S, timing: WorkerTiming = TIMING
) -> AsyncIterator[Bench]:
    bench = Bench(SleepingEngine(), drain_timeout_s, timing)
    await bench.start()
    yield bench
    await bench.started_worker.deregister()
    await bench.plane.aclose()
    assert bench.registered.open == 0


async def test_sleep_finishes_requests_and_wake_serves_again() -> None:
    async with opened() as bench:
        bench.engine.may_end.clear()
        running = asyncio.create_task(bench.ask())
        async with asyncio.timeout(SOON_S):
            while not bench.engine.log:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
        assert await bench.post("/sleep") == (202, "")
        await bench.until("draining")
        assert bench.registered.open == 0
        with pytest.raises(Draining):
            await bench.ask()
        assert (await bench.post("/sleep"))[0] == (await bench.post("/wake"))[0] == 409
        bench.engine.may_end.set()
        assert await running == [7]
        await bench.until("asleep")
        assert not bench.health.is_ready
        assert await bench.post("/sleep") == (202, "")  # it does already
        with pytest.raises(Draining):
            await bench.ask()
        assert await bench.post("/wake") == (202, "")
        await bench.until("serving")
        assert await bench.post("/wake") == (202, "")
        assert bench.registered.open == 1
        assert await bench.ask() == [7]
        assert bench.engine.log == ["r", "sleep-check", "sleep", "wake", "sleep-check", "r"]


async def test_sleep_with_long_request_stays_awake() -> None:
    async with opened(drain_timeout_s=0.01) as bench:
        bench.engine.may_end.clear()
        running = asyncio.create_task(bench.ask())
        async with asyncio.timeout(SOON_S):
            while not bench.engine.log:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
        await bench.post("/sleep")
        await bench.until("draining")
        await bench.until("serving")
        bench.engine.may_end.set()
        assert await running == [7]
        assert await bench.ask() == [7]
        assert "sleep" not in bench.engine.log


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (EngineFailed("out of memory"), EngineFailed, "out of memory"),
        (RuntimeError("a bug"), InternalError, "RuntimeError"),
        (None, EngineFailed, r"answers \[8\] after its sleep and answered \[7\] before"),
    ],
)
async def test_wake_failure_or_changed_answers_end_the_worker(
    fault: Exception | None, error: type[Exception], said: str
) -> None:
    async with opened() as bench:
        await bench.post("/sleep")
        await bench.until("asleep")
        bench.engine.fault = fault
        bench.engine.answer = 8
        await bench.post("/wake")
        with pytest.raises(error, match=said):
            await asyncio.wait_for(bench.tasks.until_failed(), SOON_S)
        assert bench.registered.open == 0


async def test_wake_when_the_engine_hangs_then_the_worker_ends() -> None:
    async with opened(timing=WorkerTiming(memory_change_s=0.01)) as bench:
        await bench.post("/sleep")
        await bench.until("asleep")
        bench.engine.may_change.clear()
        await bench.post("/wake")
        with pytest.raises(EngineFailed, match=r"did not wake up within 0\.01 s"):
            await asyncio.wait_for(bench.tasks.until_failed(), SOON_S)


async def test_sleep_twice_at_once_sleeps_once() -> None:
    async with opened() as bench:
        assert (bench.started_worker.sleep(), bench.started_worker.sleep()) == (
            "",
            "the worker is draining; retry later",
        )
        await bench.until("asleep")
        assert bench.engine.log == ["sleep-check", "sleep"]


async def test_verbs_not_allowed_are_409_or_403() -> None:
    async with opened() as bench:
        bench.engine.obstacle = "set sleep_config"
        assert await bench.post("/sleep") == (409, "set sleep_config")
        for client, status in (
            ("10.0.0.1", 403),
            ("2001:db8::1", 403),
            ("::1", 409),
            ("::ffff:127.0.0.1", 409),
        ):
            assert (await bench.post("/sleep", client))[0] == status
        # A browser sends it with every such request, and pages of all sites can make it ask this
        # machine.
        assert (await bench.post("/sleep", headers={"Origin": "http://a.example"}))[0] == 403
        assert bench.health.phase == "serving"
