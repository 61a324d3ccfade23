"""Answer status requests while a frontend starts, and hold other requests until its app is ready.

This module is imported before everything heavy. A request that needs a model waits until the models are known, because
an earlier answer would be 404.
"""

from __future__ import annotations

import asyncio

from dynamo_trtllm.errors import Draining
from dynamo_trtllm.frontend.http.admission import set_request_id
from dynamo_trtllm.http_server.errors import retry_headers
from dynamo_trtllm.http_server.exchange import Handler, HttpRequest, HttpResponse

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
    """The handler of a starting frontend. Requests wait until `open` or `close` is called, once."""

    def __init__(self) -> None:
        self._app: Handler | None = None
        self._decided = asyncio.Event()

    def open(self, app: Handler) -> None:
        """Forward all requests to `app`, including those that wait."""
        self._app = app
        self._decided.set()

    def close(self) -> None:
        """Answer the waiting requests with a retryable error. Does nothing if the gate is open."""
        self._decided.set()

    async def __call__(self, request: HttpRequest, response: HttpResponse) -> None:
        """Answer the request, now or once the gate is decided. Raises ClientDisconnected."""
        if self._app is None:
            if request.path in _EARLY and request.method in ("GET", "HEAD"):
                set_request_id(request, response)
                status, body = _EARLY[request.path]
                response.send_json(status, body, retry_headers(status))
                return
            response.cancel_on_disconnect()
            await self._decided.wait()
            response.continue_on_disconnect()  # the app decides
        if self._app is None:
            set_request_id(request, response)
            response.send_error(Draining("this frontend failed to start; see its log"))
        else:
            await self._app(request, response)
