"""Requests that end their workers, through the router: with workers that die on the in-process
request plane.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import msgspec
import pytest

from dynamo_trtllm.cluster.request_plane.client import PlaneLimits
from dynamo_trtllm.cluster.request_plane.inproc import InprocBus, InprocPlane, Subscription
from dynamo_trtllm.frontend.routing import suspects
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.generation_events import RouterOptions
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.frontend.routing.suspects import Suspicion
from dynamo_trtllm.protocol.errors import EngineFailed, QueryOfDeath, TransferFailed
from dynamo_trtllm.protocol.messages import (
    Chunk,
    Control,
    FinishReason,
    GenerateRequest,
    Phase,
    Role,
    token_ids,
)
from tests.kit.generator_streams import ChunkSource, routed_stream
from tests.kit.instances import make_instance
from tests.kit.routing import kv_chunk, request
from tests.kit.waiting import SOON_S

FOR_EVER_S = 600.0


class MortalWorker(ChunkSource):
    """A worker that dies when it runs a deadly prompt, and then is silent."""

    def __init__(self, deployment: Deployment, subject: str) -> None:
        self._deployment = deployment
        self._subject = subject
        self.is_dead = False
        self.num_calls = self.num_tokens = 0

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.num_calls += 1
        kinds = self._deployment.deadly.get(request.token_ids[0], {})
        own = request.num_resumed_output_tokens
        if request.kv_params is not None and request.token_ids[0] == KV_DEADLY:
            self._deployment.die_by_subject(request.kv_params.transfer_id)
            raise TransferFailed("the connection was reset")
        for number in range(own, own + request.sampling.max_tokens):
            await asyncio.sleep(0.001)
            if not self.is_dead and number - own == kinds.get(request.phase):
                self._deployment.die(self, self._subject)
            if self.is_dead:
                await asyncio.Event().wait()
            if request.phase is Phase.PREFILL:
                yield kv_chunk(self._subject)
                return
            self.num_tokens += 1
            is_last = number == own + request.sampling.max_tokens - 1
            yield Chunk(
                token_ids=token_ids([number]),
                finish_reason=FinishReason.LENGTH if is_last else None,
            )

    async def control(self, verb: Control) -> bytes:
        return b""


class Deployment:
    """A router and workers.

    `deadly`: by first token of the prompt, after how many tokens of which phase it kills.
    """

    def __init__(self, deadly: dict[int, dict[Phase, int]], *, replaces: bool = False) -> None:
        self.deadly = deadly
        limits = PlaneLimits(ping_interval_s=0.1, listener_timeout_s=0.05)
        self._bus = InprocBus()
        self.plane = InprocPlane(limits, self._bus)
        self.view = ClusterView()
        self.router = RequestRouter(self.view, self.plane, RouterOptions(hold_s=SOON_S))
        self.workers: list[MortalWorker] = []
        self.num_deaths = 0
        self._replaces = replaces
        self._numbers = itertools.count(1)
        self._added: list[asyncio.Task[None]] = []
        self._by_subject: dict[str, MortalWorker] = {}

    async def add(self, role: Role) -> None:
        instance = make_instance(next(self._numbers), role=role)
        worker = MortalWorker(self, instance.subject)
        self.workers.append(worker)
        self._by_subject[instance.subject] = worker
        await self.plane.serve(instance.subject, worker)
        self.view.add(instance)

    def die(self, worker: MortalWorker, subject: str) -> None:
        worker.is_dead = True
        self.num_deaths += 1
        del self._bus._subscriptions[subject]
        if self._replaces:
            self._added.append(asyncio.get_running_loop().create_task(self.add(Role.AGGREGATED)))

    def die_by_subject(self, subject: str) -> None:
        """End a worker whose end the server notices only after one more message."""
        self.die(self._by_subject[subject], subject)
        last = Subscription(subject, lambda data, reply: self._bus.remove(last))
        self._bus.add(last)

    async def run(self, asked: GenerateRequest, trace: ChoiceTimeline | None = None) -> list[int]:
        """Return the tokens of a request, within a bounded time."""
        async with (
            asyncio.timeout(3 * SOON_S),
            aclosing(routed_stream(self.router, asked, trace or ChoiceTimeline())) as stream,
        ):
            return [token async for chunk in stream for token in chunk.token_ids]


@pytest.fixture
async def deploy() -> AsyncIterator[type[Deployment]]:
    made: list[Deployment] = []

    class Closed(Deployment):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            made.append(self)

    yield Closed
    for deployment in made:
        await deployment.router.aclose()
        await deployment.plane.aclose()


def prompt(first: int, num_tokens: int = 8) -> GenerateRequest:
    asked = request(max_tokens=num_tokens)
    return msgspec.structs.replace(
        asked, token_ids=token_ids([first, 2]), deadline=time.time() + FOR_EVER_S
    )


DEADLY = 66
KV_DEADLY = 67
LIKE_ANY = 7
AGGREGATED = Phase.AGGREGATED
PREFILL = Phase.PREFILL
DECODE = Phase.DECODE


@pytest.mark.parametrize("after", [0, 3, 40])
async def test_deadly_request_ends_two_workers_at_most(
    deploy: type[Deployment], after: int
) -> None:
    deployment = deploy({DEADLY: {AGGREGATED: after}})
    for _ in range(4):
        await deployment.add(Role.AGGREGATED)
    with pytest.raises(QueryOfDeath):
        await deployment.run(prompt(DEADLY, 100))
    assert deployment.num_deaths == 2
    calls = [worker.num_calls for worker in deployment.workers]
    with pytest.raises(QueryOfDeath):
        await deployment.run(prompt(DEADLY))
    assert [worker.num_calls for worker in deployment.workers] == calls
    assert await deployment.run(prompt(LIKE_ANY)) == list(range(8))


@pytest.mark.parametrize("kinds", [{PREFILL: 0}, {DECODE: 0}, {DECODE: 3}])
async def test_request_when_it_ends_workers_of_a_pair_then_two_end(
    deploy: type[Deployment], kinds: dict[Phase, int]
) -> None:
    deployment = deploy({DEADLY: kinds})
    for role in (Role.PREFILL, Role.DECODE) * 3:
        await deployment.add(role)
    with pytest.raises(QueryOfDeath):
        await deployment.run(prompt(DEADLY))
    assert deployment.num_deaths == 2


async def test_deadly_kv_read_ends_two_prefill_workers_at_most(deploy: type[Deployment]) -> None:
    deployment = deploy({})
    for role in (Role.PREFILL, Role.DECODE) * 4:
        await deployment.add(role)
    for _ in range(2):
        with pytest.raises(QueryOfDeath):
            await deployment.run(prompt(KV_DEADLY))
    assert deployment.num_deaths == 2


async def test_deadly_request_counts_decode_and_prefill_workers(deploy: type[Deployment]) -> None:
    deployment = deploy({DEADLY: {DECODE: 5}})
    for role in (Role.PREFILL, Role.DECODE) * 3:
        await deployment.add(role)
    running = asyncio.create_task(deployment.run(prompt(DEADLY)))
    async with asyncio.timeout(SOON_S):
        while not deployment.num_deaths:  # noqa: ASYNC110  # counted by a worker
            await asyncio.sleep(0)
    deployment.deadly[DEADLY] = {PREFILL: 0}
    with pytest.raises(QueryOfDeath):
        await running
    assert deployment.num_deaths == 2


@pytest.mark.parametrize("after", [0, 3])
async def test_neighbors_of_a_deadly_request_complete(
    deploy: type[Deployment], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "MAX_UNSETTLED_TOKENS", 16)  # a shorter test
    deployment = deploy({DEADLY: {AGGREGATED: after}}, replaces=True)
    await deployment.add(Role.AGGREGATED)
    settled = [asyncio.create_task(deployment.run(prompt(first, 300))) for first in range(3)]
    async with asyncio.timeout(SOON_S):
        while deployment.workers[0].num_tokens < 300:  # noqa: ASYNC110  # counted by a worker
            await asyncio.sleep(0)
    starting = [asyncio.create_task(deployment.run(prompt(first, 300))) for first in range(3, 6)]
    deadly = asyncio.create_task(deployment.run(prompt(DEADLY)))
    with pytest.raises(QueryOfDeath):
        await deadly
    answers = await asyncio.gather(*settled, *starting)
    assert answers == [list(range(300))] * 6
    assert deployment.num_deaths == 2


async def test_choices_of_a_deadly_prompt_end_two_workers(deploy: type[Deployment]) -> None:
    deployment = deploy({DEADLY: {AGGREGATED: 0}})
    for _ in range(6):
        await deployment.add(Role.AGGREGATED)
    suspicion = Suspicion(is_shared=True)
    traces = [ChoiceTimeline(suspicion=suspicion) for _ in range(4)]
    answers = await asyncio.gather(
        *(deployment.run(prompt(DEADLY), trace) for trace in traces), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [QueryOfDeath] * 4
    assert deployment.num_deaths == 2


async def test_request_when_two_engines_failed_with_it_then_given_up(
    deploy: type[Deployment],
) -> None:
    deployment = deploy({})
    for _ in range(4):
        await deployment.add(Role.AGGREGATED)
    for worker in deployment.workers:
        worker.chunks = failing  # type: ignore[assignment, method-assign]
    with pytest.raises(QueryOfDeath):
        await deployment.run(prompt(DEADLY))


async def failing(_: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    raise EngineFailed("the engine has ended")
    yield Chunk()
