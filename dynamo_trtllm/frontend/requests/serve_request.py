"""Serve a request that generates: the story of a request, from its head to its log line.

Three objects are the request while it runs, each within the one before:

1. `Choice`: one of its answers, as the client sees it: text, finish reason and usage.
2. `RoutedRequest`: the calls of a choice to workers. It selects the workers, and reports why.
3. `GenerationFlow`: what happens next to a routed request. It is a state machine without I/O.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TypeVar

from msgspec.structs import replace

from dynamo_trtllm.api.response_schemas import ResponseMeta
from dynamo_trtllm.background import in_thread
from dynamo_trtllm.errors import DynamoError, InvalidRequest, Overloaded
from dynamo_trtllm.frontend.generation.preprocess import B, GenerationPlan
from dynamo_trtllm.frontend.requests.admission import FEW_CHOICES, RequestAdmission
from dynamo_trtllm.frontend.requests.answer import Answer, ApiAdapter
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.output_budget import check_answer
from dynamo_trtllm.frontend.requests.request_body import TURN_BYTES, RequestBody, check_json
from dynamo_trtllm.frontend.requests.send_answer import (
    RunningChoices,
    keep_alive,
    send_whole_answer,
    stream_answer,
)
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.http_server.errors import RETRY_AFTER_S
from dynamo_trtllm.http_server.exchange import ClientDisconnected, HttpRequest, HttpResponse
from dynamo_trtllm.streams import unexpected_error
from dynamo_trtllm.tokenization.served_model import ServedModel

log = logging.getLogger(__name__)

V = TypeVar("V")

_MAX_SESSION_ID = 256


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
        received = await admission.read_body(request)
        unknown = state.ignored_fields.collector()
        body = await received.parse(api.body, unknown)
        plan = await plan_request(api, body, received, request, state)
        ignored = state.ignored_fields.report(unknown, plan.ignored, request)
        admission.release_body()
        body = body.model_copy(update=dict.fromkeys(api.prompt))  # frees the text of the prompt
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


async def plan_request(
    api: ApiAdapter[B], body: B, received: RequestBody, request: HttpRequest, state: AppState
) -> GenerationPlan:
    """Plan a request: one call to workers for each of its choices.

    Args:
        api: the API of the request.
        body: the parsed body.
        received: the body that was received.
        request: the request.
        state: what all requests share.

    Raises:
        RequestError: the request is wrong or not supported.
    """
    timeline = received.timeline
    served = state.models.get(body.model)
    timeline.enter("load")
    deadline = timeline.facts.arrived_at + _timeout_s(body, state)
    call = body.call(timeline.facts.id, deadline, _session_id(request))
    if timeline.facts.traceparent is not None:
        call = replace(call, traceparent=timeline.facts.traceparent)
    prepare, stored_chars = await api.resolve(body, served, call)
    return await tokenize(
        prepare,
        served,
        received,
        state,
        stored_chars=stored_chars,
        num_choices=body.num_choices,
    )


async def tokenize(
    prepare: Callable[[], V],
    served: ServedModel,
    received: RequestBody,
    state: AppState,
    *,
    stored_chars: int,
    num_choices: int = 1,
) -> V:
    """Run the work that renders and tokenizes a request, where it delays no stream.

    Args:
        prepare: the work, which may take long and is safe in a thread.
        served: the model of the request.
        received: the body of the request.
        state: what all requests share.
        stored_chars: characters of stored text that the request refers to.
        num_choices: choices of the request.
    """
    timeline = received.timeline
    timeline.enter("tokenize")
    size = max(len(received.data), stored_chars)
    renderer = served.renderer
    if not received.is_large and not renderer.is_loaded and size > renderer.inline_bytes:
        state.models.preload(served.card.name)
    if received.is_large or size > renderer.inline_bytes:
        return await in_thread(prepare)
    if size <= TURN_BYTES and num_choices <= FEW_CHOICES:
        return prepare()
    timeline.enter("tokenize_queue")
    async with state.turns.planning.turn():
        timeline.enter("tokenize")
        return prepare()


def _timeout_s(body: B, state: AppState) -> float:
    """Return the time limit of a request: the client's wish, which the server caps."""
    if body.timeout is None:
        return state.config.request_timeout_s
    return min(body.timeout, state.config.request_timeout_s)


def _session_id(request: HttpRequest) -> str:
    """Return the conversation of a request as its header names it; "" without one.

    Raises InvalidRequest.
    """
    session_id = (request.header(b"x-session-id") or "").strip()
    if len(session_id) > _MAX_SESSION_ID:
        raise InvalidRequest(
            f"X-Session-ID has {len(session_id)} characters; at most {_MAX_SESSION_ID} are allowed"
        )
    return session_id


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
        wants_stats=timeline.facts.wants_stats,
        nvext_fields=frozenset(body.nvext.extra_fields),
        ignored=ignored,
        on_complete=partial(api.on_complete, builder, timeline.facts.client),
    )


class RequestEnding:
    """The end of a request, after the `with` block that serves it.

    An error of the block is sent to the client and not raised. ClientDisconnected and a
    cancellation are raised.
    """

    def __init__(self, timeline: RequestTimeline, response: HttpResponse, state: AppState) -> None:
        self._timeline = timeline
        self._response = response
        self._state = state

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        outcome: str | DynamoError = "cancelled"
        try:
            if error is None:
                outcome = "ok"
            elif isinstance(error, MemoryError):
                outcome = self._out_of_memory()
                await self._send(outcome)
            elif isinstance(error, Exception) and not isinstance(error, ClientDisconnected):
                outcome = self._reported(error)
                # Thousands of requests may fail at once.
                async with self._state.turns.ending.turn():
                    await self._send(outcome)
            else:
                return False
        finally:
            self._timeline.ended(outcome, self._response.status)
        return True

    def _out_of_memory(self) -> DynamoError:
        # A traceback would take more memory.
        log.error(
            "request %s failed: out of memory; lower --max-total-body-bytes",
            self._timeline.facts.id,
        )
        return Overloaded(
            "the server is out of memory for this request; try again later or send a shorter one"
        )

    def _reported(self, error: Exception) -> DynamoError:
        """Return the error for the client. Any other error than ours is a bug, which is logged."""
        if isinstance(error, DynamoError):
            return error
        return unexpected_error(error, self._timeline.facts.id)

    async def _send(self, error: DynamoError) -> None:
        """Send the error as HTTP status or as the last event of a started stream.

        After the end of the response, log it.
        """
        response = self._response
        answer = self._timeline.answer
        if response.ended:
            log.info("a request failed after its complete response: %s", error)
        elif answer is not None and answer.is_streamed and response.started:
            await response.send_events(answer.builder.error(error), last=True)
        elif isinstance(error, Overloaded):
            response.send_error(error, self._state.limits.choices.retry_after_s())
        else:
            response.send_error(error, RETRY_AFTER_S)
