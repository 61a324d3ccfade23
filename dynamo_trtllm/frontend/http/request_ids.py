"""Give each request an id, from `X-Request-Id` or generated, and add it to responses and log lines."""

from __future__ import annotations

import re
import secrets

from dynamo_trtllm.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.observability import logging as observe_logging

ECHOED_ID = re.compile(r"[\x21-\x7e]{1,128}")
ENGINE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # safe in logs, keys and subjects


def set_request_id(request: HttpRequest, response: HttpResponse) -> None:
    """Take the id of a request from `X-Request-Id`, or generate one. Add it to the response and the log lines."""
    given = request.header(b"x-request-id") or ""
    request_id = given if ECHOED_ID.fullmatch(given) else secrets.token_hex(16)
    # It is never reset: the server logs exceptions in this task, which serves no other request.
    observe_logging.request_id.set(request_id)
    request.id = request_id if ENGINE_ID.fullmatch(request_id) else ""
    response.headers["X-Request-Id"] = request_id
