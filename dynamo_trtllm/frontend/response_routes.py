"""Serve the endpoints of existing responses: get, list input items, delete, cancel."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeAlias

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_trtllm.api.responses import LOGPROBS
from dynamo_trtllm.errors import DynamoError, InvalidRequest, ResponseNotFound, UnsupportedParameter
from dynamo_trtllm.frontend.admission import InFlight
from dynamo_trtllm.frontend.generation.responses.adapter import ResponsesAdapter
from dynamo_trtllm.frontend.generation.responses.response_builder import ResponseBuilder
from dynamo_trtllm.frontend.generation.responses.response_store import ResponseStore
from dynamo_trtllm.http_server.errors import to_response

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 100


def response_routes(responses: ResponsesAdapter, store: ResponseStore, running: InFlight) -> list[Route]:
    """Return the routes below `/v1/responses/`."""
    routes = ResponseRoutes(responses, store, running)
    path = "/v1/responses/{id}"
    return [
        Route(path, _with_errors(routes.retrieve), methods=["GET"]),
        Route(path, _with_errors(routes.delete), methods=["DELETE"]),
        Route(f"{path}/cancel", _with_errors(routes.cancel), methods=["POST"]),
        Route(f"{path}/input_items", _with_errors(routes.input_items), methods=["GET"]),
    ]


def _with_errors(endpoint: Endpoint) -> Endpoint:
    """Wrap an endpoint so that its errors become error responses."""

    async def respond(request: Request) -> Response:
        try:
            return await endpoint(request)
        except DynamoError as error:
            response = to_response(error)
            return _json(response.body, response.status, response.headers)

    return respond


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status_code=status, headers=headers, media_type="application/json")


class ResponseRoutes:
    """The endpoints of existing responses.

    Responses in progress are known only to their own frontend, stored ones to all frontends that share a store.
    """

    def __init__(self, responses: ResponsesAdapter, store: ResponseStore, running: InFlight) -> None:
        self._responses = responses
        self._store = store
        self._running = running

    async def retrieve(self, request: Request) -> Response:
        _check_query(request, "stream", "include", "include[]")
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedParameter("stream is not supported for an existing response; leave it out", field="stream")
        builder = self._running_builder(request)
        if builder is not None and builder.stored:
            return _json(builder.in_progress())
        return _json((await self._store.get(_id(request))).response)

    async def input_items(self, request: Request) -> Response:
        _check_query(request, "limit", "order", "after", "include", "include[]")
        builder = self._running_builder(request)
        if builder is not None and builder.stored:
            items = builder.input_items()
        else:
            items = (await self._store.get(_id(request))).items
        return _json(_page(items, request))

    async def delete(self, request: Request) -> Response:
        response_id = _id(request)
        if self._running_builder(request) is not None:
            raise InvalidRequest(f"response {response_id!r} is still in progress; cancel it first")
        await self._store.delete(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Cancel a response in progress, prefill and decode. A response that has ended is returned unchanged."""
        builder = self._running_builder(request)
        if builder is None or not self._running.cancel(builder.id):
            return _json((await self._store.get(_id(request))).response)
        response = builder.cancelled()
        if (packed := builder.pack(response)) is not None:
            await self._store.put(builder.id, packed, builder.client)
        return _json(response)

    def _running_builder(self, request: Request) -> ResponseBuilder | None:
        response_id = _id(request)
        return self._responses.builders.get(response_id) if response_id in self._running else None


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _check_query(request: Request, *known: str) -> None:
    """Raise UnsupportedParameter for a query parameter or value that is not supported."""
    for name in request.query_params:
        if name not in known:
            raise UnsupportedParameter(f"{name} is not supported; leave it out", field=name)
    for name in ("include", "include[]"):
        for value in request.query_params.getlist(name):
            if value != LOGPROBS:  # they are included if the original request asked for them
                raise UnsupportedParameter(f"include of {value!r} is not supported; leave it out", field="include")


def _page(items: Iterable[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Return the page of items that the query selects. The default order is newest first."""
    query = request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_LIMIT))
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' or 'desc', not {order!r}", field="order")
    if not (limit.isdecimal() and len(limit) <= len(str(MAX_LIMIT)) and 1 <= int(limit) <= MAX_LIMIT):
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_LIMIT}, not {limit!r}", field="limit")
    listed = list(items)
    if order == "desc":
        listed.reverse()
    if (after := query.get("after")) is not None:
        places = [index for index, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise ResponseNotFound(f"after is {after!r}, which is not an input item of this response", field="after")
        listed = listed[places[0] + 1 :]
    page = listed[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(listed) > len(page),
    }
