"""Answer status requests while a frontend starts, and hold other requests until its app is ready.

This module is imported before everything heavy. A request that needs a model waits until the models are known, because
an earlier answer would be 404.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo_trtllm.errors import Draining
from dynamo_trtllm.frontend.http import ClientResponse
from dynamo_trtllm.frontend.request_ids import RequestIds
from dynamo_trtllm.http_server.errors import RETRY_AFTER_S, retry_headers

_STARTING = "this frontend is starting"
_EARLY = {
    "/live": (200, {"status": "live"}),
    "/ready": (503, {"status": "loading", "reason": _STARTING}),
    "/health": (
        200,
        {
            "status": "loading",
            "endpoints": [],
            "instances": [],
            "pairs": [],
            "mismatched": [],
            "rejected_records": [],
            "message": _STARTING,
        },
    ),
}


class StartupGate:
    """The ASGI app of a starting frontend. Requests wait until `open` or `close` is called, once."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._decided = asyncio.Event()
        self._early = RequestIds(_answer_early)
        self._late = RequestIds(_answer_late)

    def open(self, app: ASGIApp) -> None:
        """Forward all requests to `app`, including those that wait."""
        self._app = app
        self._decided.set()

    def close(self) -> None:
        """Answer the waiting requests with a retryable error. Does nothing if the gate is open."""
        self._decided.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            if scope["path"] in _EARLY and scope["method"] in ("GET", "HEAD"):
                await self._early(scope, receive, send)
                return
            await self._decided.wait()
        await (self._app or self._late)(scope, receive, send)


async def _answer_early(scope: Scope, receive: Receive, send: Send) -> None:
    status, body = _EARLY[scope["path"]]
    await ClientResponse(send).send_json(status, body, retry_headers(status))


async def _answer_late(scope: Scope, receive: Receive, send: Send) -> None:
    await ClientResponse(send).send_error(Draining("this frontend failed to start; see its log"), RETRY_AFTER_S)
