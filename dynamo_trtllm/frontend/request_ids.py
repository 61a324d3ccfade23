"""Give each request an id, from `X-Request-Id` or generated, and add it to responses and log lines. Raw ASGI."""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynamo_trtllm.frontend.http import header
from dynamo_trtllm.observability import logging as observe_logging

ECHOED_ID = re.compile(r"[\x21-\x7e]{1,128}")
ENGINE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # safe in logs, keys and subjects


class RequestIds:
    """ASGI middleware that takes or generates `X-Request-Id` and adds it to the response and the log lines."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id") or ""
        request_id = given if ECHOED_ID.fullmatch(given) else secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["echoed_id"] = request_id
        # It is never reset: the server logs the app's exceptions in this task, which serves no other request.
        observe_logging.request_id.set(request_id)
        state["request_id"] = request_id if ENGINE_ID.fullmatch(request_id) else ""

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))]
            await send(message)

        await self._app(scope, receive, send_with_id)
