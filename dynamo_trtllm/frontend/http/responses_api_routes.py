"""Serve existing responses of `/v1/responses`: read, cancel, delete, list their input items."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from dynamo_trtllm.access.access_control import tenant_of
from dynamo_trtllm.frontend.api.responses import ENCRYPTED_REASONING, INCLUDES_OF_HOSTED, LOGPROBS
from dynamo_trtllm.frontend.http.query import last_value, read_limit
from dynamo_trtllm.frontend.requests.answer import RunningAnswers
from dynamo_trtllm.frontend.responses_api.response_builder import ResponseBuilder
from dynamo_trtllm.frontend.responses_api.response_store import (
    ResponseStore,
    StoredResponse,
)
from dynamo_trtllm.protocol.errors import InvalidRequest, ResponseNotFound, UnsupportedParameter
from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 100


_INCLUDED: Final = (LOGPROBS, ENCRYPTED_REASONING, *INCLUDES_OF_HOSTED)


@dataclass(eq=False)
class ResponseRoutes:
    """The endpoints of existing responses.

    Only the frontend that runs a response knows it while it is in progress. All frontends that
    share a store know its stored responses.
    """

    _store: ResponseStore
    _running: RunningAnswers

    async def retrieve(self, request: HttpRequest, response: HttpResponse) -> None:
        _check_query(request, "stream", "include", "include[]")
        if last_value(request, "stream", "false") != "false":
            raise UnsupportedParameter(
                "stream is not supported for an existing response; leave it out", field="stream"
            )
        stored = await self._stored(request)
        response.send_json(200, stored.response)

    async def input_items(self, request: HttpRequest, response: HttpResponse) -> None:
        _check_query(request, "limit", "order", "after", "include", "include[]")
        stored = await self._stored(request)
        response.send_json(200, _page(stored.items, request))

    async def delete(self, request: HttpRequest, response: HttpResponse) -> None:
        response_id = request.path_params["id"]
        if self._running_builder(request) is not None:
            raise InvalidRequest(f"response {response_id!r} is still in progress; cancel it first")
        await self._store.delete(response_id, _owner(request))
        response.send_json(200, {"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: HttpRequest, response: HttpResponse) -> None:
        """Cancel a response in progress, in its prefill and in its decode phase.

        A response that has ended is returned unchanged.
        """
        builder = self._running_builder(request)
        if builder is None:
            stored = await self._store.get(request.path_params["id"], _owner(request))
            response.send_json(200, stored.response)
            return
        client = self._running.cancel(builder.id)
        cancelled = builder.cancelled()
        packed = builder.pack(cancelled)
        # None: the client does not want the response to be stored.
        if packed is not None:
            await self._store.put(builder.id, packed, client)
        response.send_json(200, cancelled)

    async def _stored(self, request: HttpRequest) -> StoredResponse:
        """Return a stored response, or what is known of one in progress that will be stored."""
        builder = self._running_builder(request)
        if builder is not None and builder.stored:
            return StoredResponse(response=builder.in_progress(), items=builder.input_items())
        return await self._store.get(request.path_params["id"], _owner(request))

    def _running_builder(self, request: HttpRequest) -> ResponseBuilder | None:
        """Return the builder of a response in progress that belongs to the client."""
        builder = self._running.builder(request.path_params["id"], _owner(request))
        return builder if isinstance(builder, ResponseBuilder) else None


def _owner(request: HttpRequest) -> str:
    """Return the name of the API key of a request; "": there are no keys."""
    tenant = tenant_of(request)
    return "" if tenant is None else tenant.key.name


def _check_query(request: HttpRequest, *known: str) -> None:
    """Raise UnsupportedParameter for a query parameter or value that is not supported."""
    query = request.query()
    for name in query:
        if name not in known:
            raise UnsupportedParameter(f"{name} is not supported; leave it out", field=name)
    for name in ("include", "include[]"):
        for value in query.get(name, ()):
            # Log-probabilities are included if the original request asked for them. The other
            # values have no effect, as in the request that creates a response.
            if value not in _INCLUDED:
                raise UnsupportedParameter(
                    f"include of {value!r} is not supported; leave it out", field="include"
                )


def _page(items: Iterable[dict[str, Any]], request: HttpRequest) -> dict[str, Any]:
    """Return the page of items that the query selects. The default order is newest first."""
    order = last_value(request, "order", "desc")
    limit = read_limit(request, default=DEFAULT_LIMIT, most=MAX_LIMIT)
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' or 'desc', not {order!r}", field="order")
    listed = list(items)
    if order == "desc":
        listed.reverse()
    after = request.query().get("after")
    if after:
        after_id = after[-1]  # of repeated parameters, the last one counts
        places = [index for index, item in enumerate(listed) if item["id"] == after_id]
        if not places:
            raise ResponseNotFound(
                f"after is {after_id!r}, which is not an input item of this response",
                field="after",
            )
        listed = listed[places[0] + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(listed) > len(page),
    }
