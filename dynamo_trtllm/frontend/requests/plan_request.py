"""Plan a request: render and tokenize its prompts, where that delays no other stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from dynamo_trtllm.background import in_thread
from dynamo_trtllm.errors import InvalidRequest
from dynamo_trtllm.frontend.generation.preprocess import B, GenerationPlan
from dynamo_trtllm.frontend.requests.answer import ApiAdapter
from dynamo_trtllm.frontend.requests.app_state import AppState
from dynamo_trtllm.frontend.requests.loop_turns import FEW_CHOICES
from dynamo_trtllm.frontend.requests.request_body import TURN_BYTES, RequestBody
from dynamo_trtllm.http_server.exchange import HttpRequest
from dynamo_trtllm.tokenization.served_model import ServedModel

V = TypeVar("V")

_MAX_SESSION_ID = 256


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
