"""Send an answer to its client: as a stream of events, or whole."""

from __future__ import annotations

import orjson

from dynamo_trtllm.background import in_thread
from dynamo_trtllm.frontend.generation.choice import ChoiceDelta, pick_best_of
from dynamo_trtllm.frontend.requests.answer import Answer
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.keep_alive import EventSender
from dynamo_trtllm.frontend.requests.response_extras import extras_of
from dynamo_trtllm.frontend.requests.running_choices import RunningChoices
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.http_server.exchange import HttpResponse

_INLINE_OUTPUT_BYTES = 256 << 10  # larger answers are encoded in a thread


async def stream_answer(
    answer: Answer,
    deltas: RunningChoices,
    response: HttpResponse,
    sender: EventSender,
    timeline: RequestTimeline,
    state: AppState,
) -> None:
    """Send the events of an answer: the deltas that were not written at once, and its end."""
    # All choices are returned, because `best_of` is rejected with `stream`.
    num_unfinished = len(answer.choices)
    async for delta in deltas:
        if not answer.has_begun:
            answer.begin(response)
        data = answer.builder.delta(delta)
        if delta.finish is not None:
            num_unfinished -= 1
            if not num_unfinished:
                async with state.turns.ending.turn():
                    data += answer.builder.finish(answer.usage(), extras_of(answer, timeline))
                await answer.on_complete()
        if data:
            await sender.send_events(data, last=not num_unfinished)


async def send_whole_answer(
    answer: Answer,
    deltas: RunningChoices,
    response: HttpResponse,
    timeline: RequestTimeline,
    state: AppState,
) -> None:
    """Collect the deltas of all choices, and send the answer when they have finished."""
    plan = answer.plan
    builder = answer.builder
    # If the best candidates are to be picked, all deltas wait for that.
    candidates: list[ChoiceDelta] = []
    add = builder.push if plan.candidates == plan.keep else candidates.append
    async for delta in deltas:
        add(delta)

    def likelihood(index: int) -> float:
        return answer.choices[index].mean_logprob

    for delta in pick_best_of(candidates, plan, likelihood):
        builder.push(delta)

    def encode() -> bytes:
        return orjson.dumps(builder.body(answer.usage(), extras_of(answer, timeline)))

    if deltas.output_bytes > _INLINE_OUTPUT_BYTES:
        async with state.limits.slot(is_large=True):
            body = await in_thread(encode)
    else:
        async with state.turns.ending.turn():
            body = encode()
    await answer.on_complete()
    response.send(200, body, headers=answer.headers())
