"""Requests over a plane that loses, repeats and reorders: the router, two pairs of mock workers,
one process.

Every request ends with the answer of an undisturbed run or with a named error, and nothing is held
afterwards. The same seed gives the same faults in the same order of messages; `--long` runs 100,000
requests.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest

import pytest

from dynamo_trtllm.cluster.request_plane.client import PlaneClient, PlaneLimits
from dynamo_trtllm.cluster.request_plane.frames import PING, Batch, Frame
from dynamo_trtllm.cluster.request_plane.inproc import InprocPlane
from dynamo_trtllm.cluster.request_plane.server import PlaneServer
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.pair_breakers import BreakerLimits, PairBreakers
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    GenerateRequest,
    Instance,
    Role,
    Sampling,
    decode,
    encode,
    token_ids,
)
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.generator_streams import routed_stream
from tests.kit.instances import CARD, make_instance
from tests.kit.loopback_backend import LoopbackBackend
from tests.kit.waiting import SOON_S

LIMITS = PlaneLimits(ack_timeout_s=1.0, ping_interval_s=0.25)
HUNG_S = 60.0  # a request of this test takes milliseconds, or a few pings where something was lost
AT_ONCE = 200
KV_TRANSFER_TTL_S = 5.0
OPENING = (200005, 17196, 200008)  # of every answer of the mock engine
# One of each fault among so many frames, and among so many messages: chance decides which ones, so
# that each kind strikes in the shortest run as well.
ONE_OF_EACH_AMONG = 500
FAULTS = ("lost", "repeated", "reordered")


@dataclass(kw_only=True)
class LossyNetwork:
    """A network that loses, repeats and reorders frames and messages while `rng` is set."""

    rng: random.Random | None = None
    # what happens to the next frames and to the next messages, in a random order
    drawn: dict[str, list[str]] = field(default_factory=lambda: {"frame": [], "message": []})
    # by receiver: overtaken by the next one
    held: dict[object, list[tuple[bytes, str]]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)

    def frames(self, frames: list[Frame]) -> list[Frame]:
        out: list[Frame] = []
        for frame in frames:
            match self._fault("frame"):
                case "lost":
                    continue
                case "repeated":
                    out += [frame, frame]
                case "reordered":
                    out.insert(max(0, len(out) - 1), frame)
                case _:
                    out.append(frame)
        return out

    def messages(self, receiver: object, data: bytes, reply: str) -> list[tuple[bytes, str]]:
        late = self.held.pop(receiver, [])
        match self._fault("message"):
            case "lost":
                return late
            case "repeated":
                return [(data, reply), (data, reply), *late]
            case "reordered":
                self.held[receiver] = [(data, reply)]
                return late
            case _:
                return [(data, reply), *late]

    def _fault(self, of: str) -> str:
        if self.rng is None:
            return ""
        drawn = self.drawn[of]
        if not drawn:
            drawn += FAULTS
            drawn += [""] * (ONE_OF_EACH_AMONG - len(FAULTS))
            self.rng.shuffle(drawn)
        fault = drawn.pop()
        if fault:
            self.faults[f"{of} {fault}"] += 1
        return fault


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[LossyNetwork]:
    network = LossyNetwork()
    at_caller = PlaneClient._on_message
    at_worker = PlaneServer._on_message

    def take_at_caller(plane: PlaneClient, data: bytes, reply: str) -> None:
        if data != PING:
            batch = decode(data, Batch)
            data = encode(Batch(network.frames(batch.frames), batch.report))
        for message in network.messages(plane, data, reply):
            at_caller(plane, *message)

    def take_at_worker(serving: PlaneServer, data: bytes, reply: str) -> None:
        for message in network.messages(serving, data, reply):
            at_worker(serving, *message)

    monkeypatch.setattr(PlaneClient, "_on_message", take_at_caller)
    monkeypatch.setattr(PlaneServer, "_on_message", take_at_worker)
    return network


@dataclass(kw_only=True)
class Cluster:
    router: RequestRouter
    plane: InprocPlane
    engines: list[MockEngine]

    def held(self) -> list[str]:
        """What is still counted, for people."""
        stats = [engine.stats() for engine in self.engines]
        left = {
            "running": sum(engine_stats.running + engine_stats.waiting for engine_stats in stats),
            "kv blocks": sum(engine_stats.kv_blocks_used for engine_stats in stats),
            "KV transfers": sum(engine_stats.pending_kv_transfers for engine_stats in stats),
            "streams at workers": sum(serving.num_running for serving in self.plane._servers),
            "streams at the caller": len(self.plane.client._inbox),
            "peers": len(self.plane.client._running)
            + sum(len(s._callers) for s in self.plane._servers),
        }
        return [f"{name}: {count}" for name, count in left.items() if count]


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    plane = InprocPlane(LIMITS)
    view = ClusterView()
    engines = []
    for number, role in enumerate((Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE), start=1):
        config = WorkerConfig(
            model_path=CARD.name,
            engine="mock",
            disaggregation_mode=role,
            kv_transfer_ttl_s=KV_TRANSFER_TTL_S,
            override_engine_args={"step_s": 0},
        )
        engine = MockEngine(config, instance_id=number, backend=LoopbackBackend())
        await engine.start()
        engines.append(engine)
        instance: Instance = make_instance(number, role=role)
        admission = WorkerAdmission()
        service = WorkerService(engine, instance, admission, files={}, metrics=WorkerMetrics())
        await plane.serve(instance.subject, service)
        view.add(instance)
    options = RouterOptions(hold_s=2.0, has_probes=False)
    router = RequestRouter(
        view, plane, options, PairBreakers(BreakerLimits(open_s=0.05, max_open_s=0.2))
    )
    yield Cluster(router=router, plane=plane, engines=engines)
    await router.aclose()
    await plane.aclose()
    for engine in engines:
        await engine.aclose()


def make_request(number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}",
        model=CARD.name,
        token_ids=token_ids([number % 97, number % 89, 7]),
        sampling=Sampling(max_tokens=2 + number % 11, temperature=0.0),
        deadline=time.time() + 10 * HUNG_S,
    )


async def answer(router: RequestRouter, number: int) -> list[int]:
    async with aclosing(routed_stream(router, make_request(number), ChoiceTimeline())) as chunks:
        return [token async for chunk in chunks for token in chunk.token_ids]


def undisturbed(number: int) -> list[int]:
    """The mock engine's answer."""
    request = make_request(number)
    seed = zlib.crc32(request.token_ids) & 0xFFFF
    rest = (
        1000 + (seed + at * (7919 + seed // 4000)) % 4000
        for at in range(request.sampling.max_tokens)
    )
    return [opening or made for opening, made in zip_longest(OPENING, rest)][
        : request.sampling.max_tokens
    ]


async def outcome(router: RequestRouter, number: int) -> str:
    try:
        async with asyncio.timeout(HUNG_S):
            got = await answer(router, number)
    except DynamoError as exc:
        return exc.code
    except TimeoutError:
        return "HUNG"
    return "right" if got == undisturbed(number) else "WRONG"


@pytest.mark.parametrize(
    "count", [600, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
async def test_lossy_plane_gives_right_answers_or_named_errors(
    network: LossyNetwork, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "dynamo_trtllm")  # each retry is a line
    async with cluster() as made:
        assert [await answer(made.router, number) for number in range(20)] == [
            *map(undisturbed, range(20))
        ]
        network.rng = random.Random(16)
        seen: Counter[str] = Counter()
        numbers = iter(range(count))

        async def one_after_the_other() -> None:
            for number in numbers:
                seen[await outcome(made.router, number)] += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
        network.rng = None
        print(f"{count} requests: {dict(seen)}; faults: {dict(network.faults)}")
        assert (seen["WRONG"], seen["HUNG"]) == (0, 0)
        assert seen["right"] > 0.99 * count
        assert len(network.faults) == 6  # each kind of fault struck
        with suppress(TimeoutError):
            # a transfer whose release was lost lives as long
            async with asyncio.timeout(SOON_S + KV_TRANSFER_TTL_S):
                while made.held():  # noqa: ASYNC110 - counts of several objects
                    await asyncio.sleep(0.1)
        assert made.held() == []
