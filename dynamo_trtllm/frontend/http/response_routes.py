"""Serve the endpoints of existing responses: get, list input items, delete, cancel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dynamo_trtllm.api.responses import LOGPROBS
from dynamo_trtllm.errors import InvalidRequest, ResponseNotFound, UnsupportedParameter
from dynamo_trtllm.frontend.generation.responses.adapter import ResponsesAdapter
from dynamo_trtllm.frontend.generation.responses.response_builder import ResponseBuilder
from dynamo_trtllm.frontend.generation.responses.response_store import ResponseStore
from dynamo_trtllm.frontend.http.admission import InFlight
from dynamo_trtllm.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.http_server.routing import Route

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 100


def response_routes(responses: ResponsesAdapter, store: ResponseStore, running: InFlight) -> list[Route]:
    """Return the routes below `/v1/responses/`."""
    routes = ResponseRoutes(responses, store, running)
    path = "/v1/responses/{id}"
    return [
        Route("GET", path, routes.retrieve),
        Route("DELETE", path, routes.delete),
        Route("POST", f"{path}/cancel", routes.cancel),
        Route("GET", f"{path}/input_items", routes.input_items),
    ]


class ResponseRoutes:
    """The endpoints of existing responses.

    Responses in progress are known only to their own frontend, stored ones to all frontends that share a store.
    """

    def __init__(self, responses: ResponsesAdapter, store: ResponseStore, running: InFlight) -> None:
        self._responses = responses
        self._store = store
        self._running = running

    async def retrieve(self, request: HttpRequest, response: HttpResponse) -> None:
        _check_query(request, "stream", "include", "include[]")
        if _last(request, "stream", "false") != "false":
            raise UnsupportedParameter("stream is not supported for an existing response; leave it out", field="stream")
        builder = self._running_builder(request)
        if builder is not None and builder.stored:
            response.send_json(200, builder.in_progress())
        else:
            response.send_json(200, (await self._store.get(_id(request))).response)

    async def input_items(self, request: HttpRequest, response: HttpResponse) -> None:
        _check_query(request, "limit", "order", "after", "include", "include[]")
        builder = self._running_builder(request)
        if builder is not None and builder.stored:
            items = builder.input_items()
        else:
            items = (await self._store.get(_id(request))).items
        response.send_json(200, _page(items, request))

    async def delete(self, request: HttpRequest, response: HttpResponse) -> None:
        response_id = _id(request)
        if self._running_builder(request) is not None:
            raise InvalidRequest(f"response {response_id!r} is still in progress; cancel it first")
        await self._store.delete(response_id)
        response.send_json(200, {"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: HttpRequest, response: HttpResponse) -> None:
        """Cancel a response in progress, prefill and decode. A response that has ended is returned unchanged."""
        builder = self._running_builder(request)
        if builder is None or not self._running.cancel(builder.id):
            response.send_json(200, (await self._store.get(_id(request))).response)
            return
        cancelled = builder.cancelled()
        if (packed := builder.pack(cancelled)) is not None:
            await self._store.put(builder.id, packed, builder.client)
        response.send_json(200, cancelled)

    def _running_builder(self, request: HttpRequest) -> ResponseBuilder | None:
        response_id = _id(request)
        return self._responses.builders.get(response_id) if response_id in self._running else None


def _id(request: HttpRequest) -> str:
    return request.path_params["id"]


def _last(request: HttpRequest, name: str, default: str) -> str:
    """Return the last value of a query parameter."""
    return request.query().get(name, [default])[-1]


def _check_query(request: HttpRequest, *known: str) -> None:
    """Raise UnsupportedParameter for a query parameter or value that is not supported."""
    query = request.query()
    for name in query:
        if name not in known:
            raise UnsupportedParameter(f"{name} is not supported; leave it out", field=name)
    for name in ("include", "include[]"):
        for value in query.get(name, ()):
            if value != LOGPROBS:  # they are included if the original request asked for them
                raise UnsupportedParameter(f"include of {value!r} is not supported; leave it out", field="include")


def _page(items: Iterable[dict[str, Any]], request: HttpRequest) -> dict[str, Any]:
    """Return the page of items that the query selects. The default order is newest first."""
    order, limit = _last(request, "order", "desc"), _last(request, "limit", str(DEFAULT_LIMIT))
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' or 'desc', not {order!r}", field="order")
    if not (limit.isdecimal() and len(limit) <= len(str(MAX_LIMIT)) and 1 <= int(limit) <= MAX_LIMIT):
        raise InvalidRequest(f"limit must be a number from 1 to {MAX_LIMIT}, not {limit!r}", field="limit")
    listed = list(items)
    if order == "desc":
        listed.reverse()
    if after := request.query().get("after"):
        places = [index for index, item in enumerate(listed) if item["id"] == after[-1]]
        if not places:
            raise ResponseNotFound(
                f"after is {after[-1]!r}, which is not an input item of this response", field="after"
            )
        listed = listed[places[0] + 1 :]
    page = listed[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(listed) > len(page),
    }
