"""Serve a request that generates: the story of a request, from its head to its log line.

Three objects are the request while it runs, each within the one before:

1. `Choice`: one of its answers, as the client sees it: text, finish reason and usage.
2. `RoutedRequest`: the calls of a choice to workers. It selects the workers, and reports why.
3. `GenerationFlow`: what happens next to a routed request. It is a state machine without I/O.
"""

from __future__ import annotations

import secrets
import time
from functools import partial

from dynamo_trtllm.api.response_schemas import ResponseMeta
from dynamo_trtllm.frontend.generation.preprocess import B, GenerationPlan
from dynamo_trtllm.frontend.requests.admission import RequestAdmission
from dynamo_trtllm.frontend.requests.answer import Answer, ApiAdapter, WantedExtras
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.body_budget import check_json
from dynamo_trtllm.frontend.requests.end_request import RequestEnding
from dynamo_trtllm.frontend.requests.keep_alive import keep_alive
from dynamo_trtllm.frontend.requests.output_budget import check_answer
from dynamo_trtllm.frontend.requests.plan_request import plan_request
from dynamo_trtllm.frontend.requests.running_choices import RunningChoices
from dynamo_trtllm.frontend.requests.send_answer import send_whole_answer, stream_answer
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.http_server.exchange import HttpRequest, HttpResponse


async def serve_request(
    api: ApiAdapter[B], state: AppState, request: HttpRequest, response: HttpResponse
) -> None:
    """Serve a request that generates. It is answered in every case.

    A disconnect of the client cancels the current task.

    Args:
        api: the API of the request.
        state: what all requests share.
        request: the request, whose body may still be arriving.
        response: where the answer is sent.

    Raises:
        ClientDisconnected: the client has disconnected.
    """
    response.cancel_on_disconnect()
    timeline = RequestTimeline(request, api.endpoint, state.subscribers)
    async with (
        RequestAdmission(state.limits, timeline) as admission,
        RequestEnding(timeline, response, state),
    ):
        # Read the body, parse it, and plan what to generate.
        admission.check_queue()
        check_json(request)
        async with admission.body(request) as received:
            unknown = state.ignored_fields.collector()
            body = await received.parse(api.body, unknown)
            plan = await plan_request(api, body, received, request, state)
            ignored = state.ignored_fields.report(unknown, plan.ignored, request)
            body = _without_prompt(body, api)
        response.deadline = plan.deadline
        if not body.stream:
            check_answer(plan)
        timeline.planned(plan)

        # Admit it, as soon as all of its choices have permits.
        admission.check_choices(len(plan.choices))
        answer = _new_answer(api, body, plan, ignored, timeline, response)
        timeline.accepted(answer)
        with keep_alive(answer, response, timeline, state.config, api.ping) as sender:
            await admission.acquire_permits(len(plan.choices), plan.deadline)
            async with state.turns.creation(len(plan.choices)):
                answer.create_choices()
            timeline.started()

            # Route its choices to workers, and answer with what they generate.
            with state.running.track(answer, timeline.facts.client):
                async with RunningChoices(answer, response, sender, timeline, state) as deltas:
                    if answer.is_streamed:
                        await stream_answer(answer, deltas, response, sender, timeline, state)
                    else:
                        await send_whole_answer(answer, deltas, response, timeline, state)


def _without_prompt(body: B, api: ApiAdapter[B]) -> B:
    """Return the body of a planned request without its prompt, to free its memory."""
    return body.model_copy(update=dict.fromkeys(api.prompt))


def _new_answer(
    api: ApiAdapter[B],
    body: B,
    plan: GenerationPlan,
    ignored: str,
    timeline: RequestTimeline,
    response: HttpResponse,
) -> Answer:
    """Return the answer to a planned request. `ignored`: its ignored fields, for a header."""
    answer_id = f"{api.id_prefix}{timeline.facts.unique_id}{secrets.token_hex(8)}"
    meta = ResponseMeta(
        id=answer_id,
        model=body.model,
        created=int(time.time()),
        request_id=response.request_id,
    )
    builder = api.builder(meta, body, plan)
    return Answer(
        answer_id,
        builder,
        plan,
        is_streamed=body.stream,
        wanted=WantedExtras(timeline.facts.wants_stats, frozenset(body.nvext.extra_fields)),
        ignored=ignored,
        on_complete=partial(api.on_complete, builder, timeline.facts.client),
    )
