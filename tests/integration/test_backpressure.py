"""Back-pressure over real etcd and NATS: reserved slots, full workers, KV that is not fetched,
transfers that hang.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from dynamo_trtllm.cluster.request_plane.server import PlaneServer
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.errors import (
    DeadlineExceeded,
    Overloaded,
    TransferMismatch,
    TransferTimeout,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvTransferParams,
    Phase,
    ReleaseKv,
    ReleaseOutcome,
    Role,
)
from dynamo_trtllm.testing.engine_requests import tokens
from dynamo_trtllm.worker.timing import TIMING, WorkerTiming
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.generator_streams import call_stream, routed_stream
from tests.kit.waiting import SOON_S
from tests.kit.workers import (
    FrontendSide,
    RunningWorkers,
    config,
    frontend_side,
    request,
    until,
)

SLOW = {"step_s": 0.3, "prefill_tokens_per_step": 10}  # 100 tokens: 3 s


class Scene:
    """One worker of each role and a frontend's side."""

    def __init__(self, side: FrontendSide, running_workers: RunningWorkers) -> None:
        self.side = side
        self.running_workers = running_workers

    async def run(self, asked: GenerateRequest, trace: ChoiceTimeline | None = None) -> list[Chunk]:
        async with aclosing(
            routed_stream(self.side.router, asked, trace or ChoiceTimeline())
        ) as chunks:
            return [chunk async for chunk in chunks]

    def serving(self, role: Role) -> PlaneServer:
        servers = [server for plane in self.running_workers.planes for server in plane._servers]
        (found,) = [server for server in servers if server.service.instance.role is role]  # type: ignore[attr-defined]
        return found

    def admission(self, role: Role) -> WorkerAdmission:
        made: WorkerAdmission = self.serving(role).service.admission  # type: ignore[attr-defined]
        return made

    def subject(self, role: Role) -> str:
        return next(
            instance.subject for instance in self.side.view.instances() if instance.role is role
        )

    async def kv_params(self) -> KvTransferParams:
        """Of a prefill call whose decode call never comes."""
        call = request(max_tokens=8, phase=Phase.PREFILL)
        async with aclosing(
            call_stream(self.side.plane, self.subject(Role.PREFILL), call)
        ) as stream:
            last = [chunk async for chunk in stream][-1]
        assert last.kv_params is not None
        return last.kv_params

    async def release(self, kv_params: KvTransferParams) -> None:
        await self.side.plane.client.control(
            self.subject(Role.PREFILL),
            ReleaseKv(kv_params.transfer_id, ReleaseOutcome.ABORTED),
            timeout_s=SOON_S,
        )

    async def until_nothing_is_left(self) -> None:
        await self.side.router.aclose()
        await self.running_workers.wait_idle()
        both = [self.admission(role) for role in (Role.PREFILL, Role.DECODE)]
        await until(
            lambda: all(
                (admission.active(), admission.reserved_slots()) == (0, 0) for admission in both
            ),
            SOON_S,
        )


@asynccontextmanager
async def scene(
    servers: tuple[str, str],
    running_workers: RunningWorkers,
    *,
    prefill: dict[str, Any] | None = None,
    timing: WorkerTiming = TIMING,
    **decode: Any,
) -> AsyncIterator[Scene]:
    """`prefill` and `decode` are settings; at the end nothing may be left."""
    shared = config(*servers)
    for role, own in ((Role.PREFILL, prefill or {}), (Role.DECODE, decode)):
        chosen = shared.model_copy(update={"disaggregation_mode": role, **own})
        running_workers.start(chosen, timing)
    async with frontend_side(shared) as side:
        await side.until_instances(2)
        made = Scene(side, running_workers)
        yield made
        await made.until_nothing_is_left()


@pytest.fixture
def servers(etcd_server: str, nats_server: str) -> tuple[str, str]:
    return etcd_server, nats_server


FIRST = {"disaggregation_strategy": "decode_first"}


async def test_decode_first_answer_equals_prefill_first(
    servers: tuple[str, str], running_workers: RunningWorkers
) -> None:
    async with scene(servers, running_workers, prefill=FIRST, **FIRST) as made:
        kept: list[int] = []
        reserve = made.admission(Role.DECODE).reserve

        def counting(reservation_id: str, expires_at: float) -> None:
            reserve(reservation_id, expires_at)
            kept.append(made.admission(Role.DECODE).reserved_slots())

        made.admission(Role.DECODE).reserve = counting  # type: ignore[method-assign]
        answers = await asyncio.gather(*(made.run(request(max_tokens=20)) for _ in range(4)))
        assert len(kept) == 4
        assert min(kept) >= 1
        assert {tuple(tokens(answer)) for answer in answers} == {tuple(tokens(answers[0]))}
        assert len(tokens(answers[0])) == 20


async def test_decode_first_when_decode_is_full_then_no_prefill(
    servers: tuple[str, str], running_workers: RunningWorkers
) -> None:
    full = {"override_engine_args": {"max_batch_size": 1, "step_s": 0.02}, "max_queued_requests": 0}
    async with scene(servers, running_workers, prefill=FIRST, **FIRST, **full) as made:
        first = asyncio.create_task(made.run(request(max_tokens=200)))
        await until(lambda: made.admission(Role.DECODE).active() == 1, SOON_S)
        await running_workers.engine_of(Role.PREFILL).drain()
        asked = made.serving(Role.PREFILL).num_running
        with pytest.raises(Overloaded, match="reserved slots of 1;"):
            await made.run(request(max_tokens=5))
        assert made.serving(Role.PREFILL).num_running == asked
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: made.admission(Role.DECODE).active() == 0, SOON_S)
        assert len(tokens(await made.run(request(max_tokens=5)))) == 5


@pytest.mark.parametrize("end", ["client gone", "deadline"])
async def test_decode_first_frees_slot_when_request_ends_in_prefill(
    servers: tuple[str, str], running_workers: RunningWorkers, end: str
) -> None:
    async with scene(
        servers, running_workers, prefill=FIRST | {"override_engine_args": SLOW}, **FIRST
    ) as made:
        running = asyncio.create_task(
            made.run(request(max_tokens=20, seconds=30 if end == "client gone" else 2.5))
        )
        await until(lambda: made.admission(Role.DECODE).reserved_slots() == 1, SOON_S)
        if end == "client gone":
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        else:
            with pytest.raises(DeadlineExceeded):
                await running


async def test_decode_first_slot_expires_when_frontend_dies(
    servers: tuple[str, str], running_workers: RunningWorkers
) -> None:
    async with scene(
        servers, running_workers, prefill=FIRST | {"override_engine_args": SLOW}, **FIRST
    ) as made:
        async with frontend_side(running_workers.workers[0]._config) as other:
            await other.until_instances(2)
            asking = asyncio.create_task(
                Scene(other, running_workers).run(request(max_tokens=20, seconds=6))
            )
            await until(lambda: made.admission(Role.DECODE).reserved_slots() == 1, SOON_S)
            await other.plane._transport._client.close()  # type: ignore[attr-defined]  # as if killed: it says nothing more
            await asyncio.gather(asking, return_exceptions=True)
            assert made.admission(Role.DECODE).reserved_slots() == 1
            await until(lambda: made.admission(Role.DECODE).reserved_slots() == 0, SOON_S)


async def test_strategies_when_the_roles_differ_then_refused_by_name(
    servers: tuple[str, str], running_workers: RunningWorkers
) -> None:
    async with scene(servers, running_workers, prefill=FIRST) as made:
        with pytest.raises(
            TransferMismatch,
            match="strategy is 'decode_first' at prefill and 'prefill_first' at decode",
        ):
            await made.run(request(max_tokens=5))


async def test_prefill_rejects_when_transfers_hold_their_kv_share(
    servers: tuple[str, str], running_workers: RunningWorkers
) -> None:
    # 4 blocks per transfer
    small = {"override_engine_args": {"kv_cache_blocks": 16}}
    timing = WorkerTiming(unfetched_kv_s=0.0)
    async with scene(servers, running_workers, prefill=small, timing=timing) as made:
        transfers = [await made.kv_params() for _ in range(3)]
        with pytest.raises(Overloaded, match="3 pending KV transfers hold 12 of 16 KV blocks"):
            await made.run(request(max_tokens=5))
        for kv_params in transfers:
            await made.release(kv_params)
        await running_workers.wait_idle()
        assert len(tokens(await made.run(request(max_tokens=5)))) == 5


async def test_worker_when_it_is_full_then_the_router_asks_another(
    servers: tuple[str, str], running_workers: RunningWorkers
) -> None:
    one = {"override_engine_args": {"max_batch_size": 1, "step_s": 0.02}, "max_queued_requests": 0}
    async with scene(servers, running_workers, **one) as made:
        running_workers.start(running_workers.workers[1]._config)
        await made.side.until_instances(3)
        traces = [ChoiceTimeline() for _ in range(3)]
        running = [
            asyncio.create_task(made.run(request(max_tokens=200), trace)) for trace in traces[:2]
        ]
        await until(lambda: all(trace.decode_instance is not None for trace in traces[:2]), SOON_S)
        with pytest.raises(Overloaded):
            await made.run(request(max_tokens=5), traces[2])
        assert traces[0].decode_instance != traces[1].decode_instance
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await running_workers.wait_idle()
        running_workers.workers.pop().stop()
        await running_workers.tasks.pop()
        running_workers.planes.pop()


async def test_hanging_transfer_times_out_after_its_own_bound(
    servers: tuple[str, str], running_workers: RunningWorkers
) -> None:
    async with scene(servers, running_workers, kv_fetch_timeout_s=0.3) as made:

        async def hang(*_: Any, timeout_s: float, **__: Any) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.Event().wait()
            except TimeoutError as exc:
                raise TransferTimeout("the backend waited in vain") from exc

        running_workers.engine_of(Role.DECODE)._backend.read = hang  # type: ignore[method-assign]
        begun = time.monotonic()
        trace = ChoiceTimeline()
        with pytest.raises(
            TransferTimeout, match=r"did not finish before --kv-fetch-timeout-s 0\.3 passed"
        ):
            await made.run(request(max_tokens=20), trace)
        assert 0.6 <= time.monotonic() - begun < SOON_S  # the prefill call was repeated once


async def test_deadline_between_transfer_and_decode_frees_transfer(
    servers: tuple[str, str], running_workers: RunningWorkers
) -> None:
    """The decode worker has the call and has not begun it."""
    async with scene(servers, running_workers) as made:
        came = asyncio.Event()
        made.serving(Role.DECODE)._open = lambda _: came.set()  # type: ignore[assignment,method-assign]
        running = asyncio.create_task(made.run(request(max_tokens=20, seconds=2.5)))
        await asyncio.wait_for(came.wait(), SOON_S)
        assert running_workers.engine_of(Role.PREFILL).stats().pending_kv_transfers == 1
        with pytest.raises(DeadlineExceeded):
            await running
