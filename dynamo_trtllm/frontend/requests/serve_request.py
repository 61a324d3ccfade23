"""Serve a request that generates, from its head to its log line.

`serve_request` has all steps of a request that succeeds. `handle_request` calls it, answers its
errors, and ends the request.

While a request runs, it consists of three kinds of objects, each within the one before:

1. `Choice`: one of the alternatives in the answer, as the client sees it: text, finish reason and
   usage.
2. `RoutedRequest`: the calls of a choice to workers. It selects the workers, and reports why.
3. `GenerationFlow`: what happens next to a routed request. It is a state machine without I/O.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias, TypeVar

from msgspec.structs import replace

from dynamo_trtllm.access.access_control import Tenant
from dynamo_trtllm.frontend.api.response_schemas import ResponseMeta
from dynamo_trtllm.frontend.requests.admission import FEW_CHOICES, RequestAdmission
from dynamo_trtllm.frontend.requests.answer import Answer, ApiAdapter
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.output_budget import check_answer_size
from dynamo_trtllm.frontend.requests.preprocess import B, GenerationPlan
from dynamo_trtllm.frontend.requests.request_body import TURN_BYTES, RequestBody, check_json
from dynamo_trtllm.frontend.requests.request_slo import request_slo
from dynamo_trtllm.frontend.requests.send_answer import (
    RunningChoices,
    keep_alive,
    send_whole_answer,
    stream_answer,
)
from dynamo_trtllm.frontend.requests.timeline import RequestTimeline
from dynamo_trtllm.frontend.tokenization.served_model import ServedModel
from dynamo_trtllm.protocol.errors import DynamoError, InvalidRequest, Overloaded
from dynamo_trtllm.protocol.http_status import RETRY_AFTER_S
from dynamo_trtllm.protocol.messages import GenerateRequest
from dynamo_trtllm.protocol.streams import unexpected_error
from dynamo_trtllm.support.background import in_thread
from dynamo_trtllm.support.http_server.exchange import (
    ClientDisconnected,
    Exchange,
    HttpRequest,
    HttpResponse,
)

log = logging.getLogger(__name__)

V = TypeVar("V")

# A function that sends the response of a request. If it raises an error, it has not sent this error
# to the client.
Serve: TypeAlias = Callable[[Exchange, RequestTimeline, RequestAdmission], Awaitable[None]]

_MAX_SESSION_ID = 256  # limit of the characters of X-Session-ID


async def serve_request(
    api: ApiAdapter[B],
    state: AppState,
    exchange: Exchange,
    timeline: RequestTimeline,
    admission: RequestAdmission,
) -> None:
    """Serve a request that generates. `handle_request` calls it, answers its errors, and ends it.

    Args:
        api: the API of the request.
        state: what all requests share.
        exchange: the request, whose body may still be arriving, and its response.
        timeline: the timeline of the request, which gets its events.
        admission: holds the permits, memory and places that the request takes, until its end.

    Raises:
        DynamoError: the request failed, maybe after a part of its stream was sent.
        ClientDisconnected: the client has disconnected.
    """
    request, response = exchange
    # Read the body, parse it, and plan what to generate.
    admission.check_key()
    admission.check_queue()
    check_json(request)
    received = await admission.read_body(request)
    unknown_fields = state.ignored_fields.collector()
    body = await received.parse(api.body, unknown_fields)
    plan = await plan_request(api, body, received, request, state)
    ignored_header = state.ignored_fields.report(unknown_fields, plan.ignored, request)
    admission.release_body()
    # Planning has tokenized the prompt. Its text, which may be large, is freed.
    no_prompt: dict[str, None] = dict.fromkeys(api.prompt_fields)
    body = body.model_copy(update=no_prompt)
    response.deadline = plan.deadline
    if not body.stream:
        check_answer_size(plan)
    timeline.planned(plan)
    response.headers |= admission.charge_key(plan)

    # Admit it: wait until all of its choices have permits, and places in the start window of the
    # model. Then create them.
    admission.check_choices(len(plan.choices))
    answer = _new_answer(api, body, plan, ignored_header, timeline, response)
    timeline.accepted(answer)
    with keep_alive(answer, response, timeline, state.config, api.ping) as sender:
        places = await admission.acquire_places(plan)
        async with state.turns.creation(len(plan.choices)):
            answer.create_choices()
        timeline.started()

        # Route its choices to workers, and answer with what they generate.
        facts = timeline.facts
        with state.running.track(answer, facts.client_id, facts.owner):
            running = RunningChoices(answer, response, sender, timeline, places, state)
            async with running as deltas:
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
        RequestError: the request is wrong, not supported, or not allowed with its API key.
    """
    timeline = received.timeline
    tenant = timeline.facts.tenant
    served = state.models.get(body.model, tenant)
    # In this phase, `resolve` reads what the request refers to.
    timeline.enter("load")
    deadline = timeline.facts.arrived_at + _timeout_s(body, state)
    call = body.call(timeline.facts.id, deadline, _session_id(request))
    # If neither the request nor its key has a priority, the call needs no priority.
    if tenant is not None and (call.priority or tenant.key.priority):
        call = replace(call, priority=tenant.priority(body.requested_priority))
    if tenant is not None:
        call = _scope_to_tenant(call, tenant, served)
    slo = request_slo(request, body.nvext, state.config.router_mode)
    if slo is not None:
        call = replace(call, slo=slo)
    if timeline.facts.traceparent is not None:
        call = replace(call, traceparent=timeline.facts.traceparent)
    prepare, stored_chars = await api.resolve(body, served, call, timeline.facts.owner)
    return await tokenize(
        prepare,
        served,
        received,
        state,
        stored_chars=stored_chars,
        num_choices=body.num_choices,
    )


def _scope_to_tenant(call: GenerateRequest, tenant: Tenant, served: ServedModel) -> GenerateRequest:
    """Return a call whose cache salt and conversation belong to its API key.

    Requests of different keys share neither a prefix cache nor a conversation, even if their
    clients send the same names. Hits in a shared prefix cache would reveal prompts.
    """
    # A salt that the engine does not support is rejected later.
    if "cache_salt" not in served.card.unsupported_features:
        call = replace(call, cache_salt=tenant.scoped(call.cache_salt or ""))
    if call.conversation_id:
        call = replace(call, conversation_id=tenant.scoped(call.conversation_id))
    return call


async def tokenize(
    prepare: Callable[[], V],
    served: ServedModel,
    received: RequestBody,
    state: AppState,
    *,
    stored_chars: int,
    num_choices: int = 1,
) -> V:
    """Plan a request so that it delays no stream: render it, and tokenize it.

    A small request is planned at once, and a large one in a thread. One of middle size waits for
    its turn: the event loop does other work between such requests.

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
    # A rough size: what the request refers to is usually much longer or much shorter than its body.
    size = max(len(received.data), stored_chars)
    renderer = served.renderer
    # A loaded renderer is faster, so the next prompts of this size may need no thread.
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
    """Return the conversation that the header of a request names; "" without this header.

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
    facts = timeline.facts
    # `explain` finds the request by its unique id. But a client that knows the id of a stored
    # response can read the response, and logs have the unique id, too. So the id of the response
    # also has random characters.
    answer_id = f"{api.id_prefix}{facts.unique_id}{secrets.token_hex(8)}"
    meta = ResponseMeta(
        id=answer_id,
        model=body.model,
        created=int(time.time()),
        request_id=response.request_id,
        owner=facts.owner,
    )
    builder = api.builder(meta, body, plan)
    return Answer(
        answer_id,
        builder,
        plan,
        is_streamed=body.stream,
        wants_stats=facts.wants_stats,
        nvext_fields=frozenset(body.nvext.extra_fields),
        ignored=ignored,
        on_complete=partial(api.on_complete, builder, facts.client_id),
    )


async def handle_request(
    endpoint: str, serve: Serve, state: AppState, request: HttpRequest, response: HttpResponse
) -> None:
    """Handle a request: `serve` it, answer it in every case, and end it.

    A disconnect of the client cancels the current task.

    Args:
        endpoint: the value of the metric label `endpoint`.
        serve: sends the response.
        state: what all requests share.
        request: the request, whose body may still be arriving.
        response: where the answer is sent.

    Raises:
        ClientDisconnected: the client has disconnected.
    """
    response.cancel_on_disconnect()
    timeline = RequestTimeline(request, endpoint, state.subscribers)
    outcome: str | DynamoError = "cancelled"
    with RequestAdmission(state.limits, timeline) as admission:
        try:
            outcome = await _outcome(
                serve(Exchange(request, response), timeline, admission), timeline
            )
            if isinstance(outcome, DynamoError):
                # Other requests may wait for the memory of the body.
                admission.release_body()
                # Thousands of requests may fail at once.
                async with state.turns.ending.turn():
                    await _send_error(outcome, response, timeline, state)
        finally:
            timeline.ended(outcome, response.status)
            # An error refers to this frame. If the frame also referred to it, the cycle would keep
            # the body in memory.
            del outcome


async def _outcome(serving: Awaitable[None], timeline: RequestTimeline) -> str | DynamoError:
    """Serve a request. Return "ok", or the error that was not sent to the client yet.

    The error is returned and not raised, because the caller waits while it sends the error. If that
    wait were in an `except` block, a cancellation of it would have the error as its context. The
    error of a time limit refers, through its task, to that cancellation. This cycle would keep the
    body in memory.

    Raises ClientDisconnected.
    """
    try:
        await serving
    except ClientDisconnected:
        raise
    except MemoryError:
        # A traceback would take more memory.
        log.error(
            "request %s failed: out of memory; lower --max-total-body-bytes", timeline.facts.id
        )
        return Overloaded(
            "the server is out of memory for this request; try again later or send a shorter one"
        )
    except DynamoError as error:
        return error
    except Exception as error:  # noqa: BLE001 - any bug: it is logged, and answered as `internal`
        return unexpected_error(error, timeline.facts.id)
    return "ok"


async def _send_error(
    error: DynamoError, response: HttpResponse, timeline: RequestTimeline, state: AppState
) -> None:
    """Send the error as HTTP status or as the last event of a started stream.

    If the response has ended already, only log the error.
    """
    answer = timeline.answer
    if response.ended:
        log.info("a request failed after its complete response: %s", error)
    elif answer is not None and answer.is_streamed and response.started:
        await response.send_events(answer.builder.error(error), last=True)
    elif isinstance(error, Overloaded):
        response.send_error(error, state.limits.choice_permits.retry_after_s())
    else:
        response.send_error(error, RETRY_AFTER_S)
