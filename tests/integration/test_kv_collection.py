"""Bursts of cancels over trtllm workers on the stand-in: no KV waits for the timeout of the
library.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.cluster.request_plane.frames import Frame
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.messages import Chunk, Role
from dynamo_trtllm.protocol.streams import StreamEvent
from tests.kit.engines import trtllm_args
from tests.kit.fake_packages import fake_tensorrt_llm
from tests.kit.tiny_models import save_tiny_gpt_oss
from tests.kit.waiting import SOON_S
from tests.kit.workers import (
    FrontendSide,
    RunningWorkers,
    frontend_side,
    request,
    until,
)

REQUESTS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gpt_oss(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def package() -> Iterator[Any]:
    with fake_tensorrt_llm() as found:
        yield found


def config(etcd: str, nats: str, folder: Path, role: Role) -> WorkerConfig:
    return WorkerConfig(
        etcd_endpoints=etcd,
        nats_server=nats,
        namespace=f"t{uuid.uuid4().hex}",
        model_path=str(folder),
        served_model_name="tiny",
        engine="trtllm",
        drain_timeout_s=2.0,
        kv_transfer_ttl_s=600.0,  # the library's timeout is a tenth longer
        disaggregation_mode=role,
        override_engine_args=trtllm_args(role),
    )


def cancel_all_at(
    side: FrontendSide, arrival: int, *, before_it_is_read: bool
) -> list[StreamEvent]:
    """Start requests. Cancel all of them when KV transfer parameters arrive for the n-th time.

    Return the list of their events.
    """
    events: list[StreamEvent] = []
    handles = [
        side.router.generate(request(max_tokens=500), ChoiceTimeline(), events.append)
        for _ in range(REQUESTS)
    ]
    feed = side.plane.client._inbox._feed
    num_arrived = 0

    def cancel_all() -> None:
        for handle in handles:
            handle.cancel()

    def counting(frames: list[Frame]) -> None:
        nonlocal num_arrived
        has_kv = [
            isinstance(frame.chunk, Chunk) and frame.chunk.kv_params is not None for frame in frames
        ]
        num_arrived += sum(has_kv)
        if any(has_kv) and num_arrived >= arrival and before_it_is_read:
            cancel_all()
        feed(frames)
        if any(has_kv) and num_arrived >= arrival:
            cancel_all()

    side.plane.client._inbox._feed = counting  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize("before_it_is_read", [True, False])
# When half of them have arrived, there are also requests as in the other two cases: of which KV has
# not arrived, and of which the decode calls run.
@pytest.mark.parametrize(
    "arrival",
    [6, *(pytest.param(arrival, marks=pytest.mark.long) for arrival in (1, REQUESTS))],
)
async def test_cancels_leave_no_kv_waiting_for_library_timeout(
    etcd_server: str,
    nats_server: str,
    folder: Path,
    package: Any,
    running_workers: RunningWorkers,
    arrival: int,
    before_it_is_read: bool,
) -> None:
    chosen = config(etcd_server, nats_server, folder, Role.PREFILL)
    for role in (Role.PREFILL, Role.DECODE):
        own = {"disaggregation_mode": role, "override_engine_args": trtllm_args(role)}
        running_workers.start(chosen.model_copy(update=own))
    async with frontend_side(chosen) as side:
        await side.until_instances(2)
        outcomes: list[str] = []
        side.router.kv_collector.on_end = outcomes.append
        cancel_all_at(side, arrival, before_it_is_read=before_it_is_read)
        await until(lambda: "ok" in outcomes, SOON_S)

        def used() -> list[int]:
            return [stats.kv_blocks_used for stats in package.standin.core.live_stats()]

        await until(lambda: not any(used()), SOON_S, used)
        await running_workers.wait_idle()
        await until(lambda: len(side.router.kv_collector) == 0, SOON_S)
