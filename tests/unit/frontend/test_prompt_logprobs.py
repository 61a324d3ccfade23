"""The log-probabilities of a prompt, through the router: those of one prefill or aggregated call,
once each.
"""

from __future__ import annotations

from dynamo_trtllm.frontend.routing.choice_timeline import ChoiceTimeline
from dynamo_trtllm.protocol.errors import Disconnected
from dynamo_trtllm.protocol.messages import Chunk, Role, TokenLogprob
from tests.kit.routing import FINISHED, Cluster, kv_chunk

SCORED = [TokenLogprob(token, -float(token)) for token in (1, 2, 3)]
SCORING = {"logprobs": 0, "prompt_logprobs": 0}


def scores(*logprobs: TokenLogprob) -> Chunk:
    return Chunk(prompt_logprobs=logprobs)


async def test_prompt_logprobs_of_a_pair_are_those_of_prefill(cluster: Cluster) -> None:
    await cluster.add(1, Role.PREFILL, [scores(*SCORED[:2]), scores(SCORED[2]), kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, FINISHED)
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace, **SCORING) == [10, 11, 12, 13]
    assert trace.prompt_logprobs == SCORED


async def test_prompt_logprobs_of_retried_prefill_appear_once(cluster: Cluster) -> None:
    await cluster.add(1, Role.PREFILL, [scores(*SCORED[:2]), Disconnected("gone")])
    await cluster.add(3, Role.PREFILL, [scores(*SCORED), kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, FINISHED)
    trace = ChoiceTimeline()
    await cluster.tokens(trace, **SCORING)
    assert (trace.prompt_logprobs, trace.retries) == (SCORED, 1)


async def test_prompt_logprobs_are_not_computed_after_migration(cluster: Cluster) -> None:
    await cluster.add(1, Role.AGGREGATED, [scores(*SCORED), FINISHED[0], Disconnected("gone")])
    other = await cluster.add(3, Role.AGGREGATED, FINISHED[1:])
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace, **SCORING) == [10, 11, 12, 13]
    assert (trace.prompt_logprobs, trace.migrations) == (SCORED, 1)
    assert other.requests[0].sampling.prompt_logprobs is None
