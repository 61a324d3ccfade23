"""Probes over real engines: a pair whose KV arrives wrongly is found, whatever engine and backend
move it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.pair_breakers import BreakerLimits, PairBreakers, PairState
from dynamo_trtllm.frontend.routing.pair_probe import PairProbes
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.kv_transfer.memory import view as bytes_of
from dynamo_trtllm.kv_transfer.tcp import TcpBackend
from dynamo_trtllm.kv_transfer.transfer_backend import Destination, TransferBackend
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.messages import GenerateRequest, ModelDeploymentCard, Role, token_ids
from dynamo_trtllm.testing.engine_requests import ask
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.engines import make
from tests.kit.fake_packages import fake_tensorrt_llm, fake_vllm, shorten_waits
from tests.kit.generator_streams import routed_stream
from tests.kit.instances import make_instance
from tests.kit.loopback_backend import LoopbackBackend
from tests.kit.waiting import SOON_S

GOOD = (1, 2)
BAD = (1, 3)
Way = Callable[[memoryview], None]


def zeros(kv: memoryview) -> None:
    kv[:] = bytes(len(kv))


def shuffled(kv: memoryview) -> None:
    at = len(kv) // 3
    kv[:] = bytes(kv[at:]) + bytes(kv[:at])


def one_byte_in_eight(kv: memoryview) -> None:
    kv[::8] = bytes(len(kv[::8]))


WAYS = {
    "mock": (zeros, shuffled, one_byte_in_eight),
    "torch": (zeros, shuffled),
    "trtllm": (zeros,),
    "vllm": (zeros,),
}


class Damage:
    """Changes what KV transfer backends of this process have read, before the engine learns of
    it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[TransferBackend] = []
        self.damaged: TransferBackend | None = None
        self.way: Way | None = None
        for kind in (LoopbackBackend, TcpBackend):
            monkeypatch.setattr(kind, "start", self._noting(kind.start))
            monkeypatch.setattr(kind, "read", self._damaging(kind.read))

    def _noting(self, start: Any) -> Any:
        async def noting(backend: TransferBackend, *args: Any) -> None:
            self.started.append(backend)
            await start(backend, *args)

        return noting

    def _damaging(self, fetch: Any) -> Any:
        async def damaging(
            backend: TransferBackend,
            transfer_id: str,
            offer: bytes,
            to: Destination,
            *,
            timeout_s: float,
        ) -> None:
            def changed(index: int) -> None:
                if backend is self.damaged and self.way is not None:
                    self.way(bytes_of(to.regions[index]))
                if to.on_region is not None:
                    to.on_region(index)

            await fetch(
                backend, transfer_id, offer, Destination(to.regions, changed), timeout_s=timeout_s
            )

        return damaging


class Deployment:
    """One prefill worker and two decode workers; the second decode worker, 3, can be made to read
    wrong KV.
    """

    def __init__(self, kind: str, damage: Damage) -> None:
        self._kind = kind
        self.plane = InprocPlane()
        self.view = ClusterView()
        self.codes: Counter[str] = Counter()
        self._damage = damage
        self._reader: Any = None  # the last engine

    async def add(self, number: int, role: Role, engine: Engine) -> None:
        info = await engine.start()
        made = ModelDeploymentCard(
            name="tiny",
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            renderer=info.renderer,
        )
        instance = msgspec.structs.replace(
            make_instance(number, role=role),
            engine=info.engine,
            card=made,
            layout=info.layout,
            limits=info.limits,
            kv_compat=info.kv_compat,
            can_aggregate=info.can_aggregate,
        )
        admission = WorkerAdmission()
        service = WorkerService(engine, instance, admission, files={}, metrics=WorkerMetrics())
        await self.plane.serve(instance.subject, service)
        self.view.add(instance)
        self._reader = engine
        if self._damage.started:
            self._damage.damaged = self._damage.started[-1]

    def read_wrongly(self, way: Way | None) -> None:
        self._damage.way = way
        if self._kind == "vllm":  # its stand-in moves no bytes
            self._reader._llm.core.reads_wrongly = way is not None

    def probe_finished(self, *, model: str, code: str) -> None:
        self.codes[code] += 1

    @asynccontextmanager
    async def frontend(self) -> AsyncIterator[tuple[PairBreakers, RequestRouter]]:
        breakers = PairBreakers(BreakerLimits(open_s=0.5))
        router = RequestRouter(
            self.view, self.plane, RouterOptions(hold_s=SOON_S, has_probes=True), breakers
        )
        probes = PairProbes(router, self.probe_finished, interval_s=60.0, timeout_s=SOON_S)
        task = asyncio.create_task(probes.run())
        try:
            yield breakers, router
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await router.aclose()


@pytest.fixture(
    params=[
        "mock",
        "torch",
        pytest.param("trtllm", id="trtllm stand-in"),
        "vllm",
    ]
)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = str(request.param)
    if name == "trtllm":
        shorten_waits(monkeypatch)
        with fake_tensorrt_llm():
            yield name
    elif name == "vllm":
        with fake_vllm():
            yield name
    else:
        yield name


@pytest.fixture
async def deployment(
    kind: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Deployment]:
    args: dict[str, Any] = {"step_s": 0} if kind == "mock" else {}
    deployment = Deployment(kind, Damage(monkeypatch))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(deployment.plane.aclose)
        for number, role in enumerate((Role.PREFILL, Role.DECODE, Role.DECODE), 1):
            engine = make(kind, llama, role, **args)
            stack.push_async_callback(engine.aclose)
            await deployment.add(number, role, engine)
        yield deployment


async def tokens_of(
    router: RequestRouter, request: GenerateRequest, trace: ChoiceTimeline
) -> list[int]:
    async with aclosing(routed_stream(router, request, trace)) as chunks:
        return [token async for chunk in chunks for token in chunk.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - it changes on its own
            await asyncio.sleep(0.005)


async def test_pair_that_reads_other_kv_is_never_used(kind: str, deployment: Deployment) -> None:
    request = ask(token_ids(range(100, 200)))
    right = None
    for way in (None, *WAYS[kind]):
        deployment.read_wrongly(way)
        deployment.codes.clear()
        async with deployment.frontend() as (breakers, router):
            for _ in range(2):
                trace = ChoiceTimeline()
                answer = await tokens_of(router, request, trace)
                right = right or answer
                assert answer == right
                assert way is None or trace.decode_instance == 2
            await until(lambda: breakers.status(GOOD).state is PairState.WORKING)
            if way is None:
                await until(lambda: breakers.status(BAD).state is PairState.WORKING)
                assert deployment.codes == {"ok": 2}
                continue
            await until(
                lambda: (
                    breakers.is_open(BAD) and breakers.status(BAD).state is PairState.QUARANTINED
                )
            )
            assert set(deployment.codes) == {"ok", "mismatch"}
            assert "KV arrives changed" in breakers.status(BAD).reason
            deployment.read_wrongly(None)
            if way is WAYS[kind][-1]:
                await until(lambda: breakers.status(BAD).state is PairState.WORKING)
