"""Requests on elastic workers: what is called, what is refused, and how the time is divided."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.errors import KvTransfersFull
from dynamo_trtllm.protocol.messages import Phase, Role
from dynamo_trtllm.protocol.shares import Shares
from tests.kit.instances import elastic_instance
from tests.kit.routing import FINISHED, Cluster, kv_chunk

PREFILLS = Shares(1.0, 0.0)
DECODES = Shares(0.0, 1.0)
ANSWER = [10, 11, 12, 13]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def test_elastic_pair_divides_the_time_by_role(cluster: Cluster) -> None:
    prefill = await cluster.add_instance(elastic_instance(1, PREFILLS), [kv_chunk("t1")])
    decode = await cluster.add_instance(elastic_instance(2, DECODES), FINISHED)
    timeline = ChoiceTimeline()
    assert await cluster.tokens(timeline) == ANSWER
    assert [call.phase for call in prefill.requests] == [Phase.PREFILL]
    assert [call.phase for call in decode.requests] == [Phase.DECODE]
    roles = {span.phase: span.role for span in timeline.spans}
    assert roles["prefill"] == Role.PREFILL
    assert roles["first_token"] == roles["decode"] == Role.DECODE


async def test_refused_prefill_call_becomes_a_whole_request(cluster: Cluster) -> None:
    full = KvTransfersFull("full")
    refusing = await cluster.add_instance(elastic_instance(1, PREFILLS), [full])
    other = await cluster.add_instance(elastic_instance(2, DECODES), FINISHED)
    timeline = ChoiceTimeline()
    assert await cluster.tokens(timeline) == ANSWER
    assert [call.phase for call in refusing.requests] == [Phase.PREFILL]
    assert [call.phase for call in other.requests] == [Phase.AGGREGATED]
    # A refusal uses up no retry, and the worker is not avoided.
    assert timeline.retries == 0
    assert not cluster.router.health.cooling_down(0.0)


async def test_many_refusals_do_not_end_the_request(cluster: Cluster) -> None:
    for number in range(1, 9):
        full = [KvTransfersFull("full")]
        await cluster.add_instance(elastic_instance(number, PREFILLS), full)
    last = await cluster.add_instance(elastic_instance(9, DECODES), FINISHED)
    assert await cluster.tokens() == ANSWER
    assert [call.phase for call in last.requests] == [Phase.AGGREGATED]


async def test_one_elastic_worker_runs_whole_requests(cluster: Cluster) -> None:
    worker = await cluster.add_instance(elastic_instance(1), FINISHED)
    assert await cluster.tokens() == ANSWER
    assert [call.phase for call in worker.requests] == [Phase.AGGREGATED]


async def test_change_of_shares_leaves_a_running_request_alone(cluster: Cluster) -> None:
    resumed = asyncio.Event()
    paused = [FINISHED[0], resumed, *FINISHED[1:]]
    one = await cluster.add_instance(elastic_instance(1, PREFILLS), [kv_chunk("t1")], FINISHED)
    other = await cluster.add_instance(elastic_instance(2, DECODES), paused, [kv_chunk("t2")])
    running = asyncio.create_task(cluster.tokens())
    await other.hanging.wait()
    cluster.view.set_shares({1: DECODES, 2: PREFILLS})
    assert await cluster.tokens() == ANSWER
    resumed.set()
    assert await running == ANSWER
    assert [call.phase for call in one.requests] == [Phase.PREFILL, Phase.DECODE]
    assert [call.phase for call in other.requests] == [Phase.DECODE, Phase.PREFILL]
