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


async def test_prompt_logprobs_when_a_pair_serves_then_those_of_prefill_are_in_the_trace(
    cluster: Cluster,
) -> None:
    await cluster.add(1, Role.PREFILL, [scores(*SCORED[:2]), scores(SCORED[2]), kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, FINISHED)
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace, **SCORING) == [10, 11, 12, 13]
    assert trace.prompt_logprobs == SCORED


async def test_prompt_logprobs_when_prefill_is_retried_then_each_is_there_once(
    cluster: Cluster,
) -> None:
    await cluster.add(1, Role.PREFILL, [scores(*SCORED[:2]), Disconnected("gone")])
    await cluster.add(3, Role.PREFILL, [scores(*SCORED), kv_chunk("t1")])
    await cluster.add(2, Role.DECODE, FINISHED)
    trace = ChoiceTimeline()
    await cluster.tokens(trace, **SCORING)
    assert (trace.prompt_logprobs, trace.retries) == (SCORED, 1)


async def test_prompt_logprobs_when_the_request_migrates_then_they_are_not_computed_again(
    cluster: Cluster,
) -> None:
    await cluster.add(1, Role.AGGREGATED, [scores(*SCORED), FINISHED[0], Disconnected("gone")])
    other = await cluster.add(3, Role.AGGREGATED, FINISHED[1:])
    trace = ChoiceTimeline()
    assert await cluster.tokens(trace, **SCORING) == [10, 11, 12, 13]
    assert (trace.prompt_logprobs, trace.migrations) == (SCORED, 1)
    assert other.requests[0].sampling.prompt_logprobs is None
