"""Build error responses. The HTTP status of an error decides its OpenAI error type."""

from __future__ import annotations

from typing import Final, NamedTuple

from dynamo_trtllm.api.response_schemas import ErrorObject, ErrorType, error_body
from dynamo_trtllm.errors import DynamoError

INVALID: Final = "invalid_request_error"
_OTHER_TYPES: Final[dict[int, ErrorType]] = {429: "rate_limit_error", 503: "service_unavailable_error"}
RETRY_AFTER_S = 1
RETRY_LATER = frozenset({429, 503})  # statuses with a Retry-After header


class ErrorResponse(NamedTuple):
    status: int
    body: ErrorObject
    headers: dict[str, str]


def to_response(error: DynamoError, retry_after_s: int = RETRY_AFTER_S) -> ErrorResponse:
    """Return the response for an error."""
    status = error.http_status
    error_type = _OTHER_TYPES.get(status) or (INVALID if status < 500 else "server_error")
    body = error_body(error.message, type=error_type, param=error.field, code=error.code)
    return ErrorResponse(status, body, retry_headers(status, retry_after_s))


def retry_headers(status: int, retry_after_s: int = RETRY_AFTER_S) -> dict[str, str]:
    """Return the Retry-After header if the status has one."""
    return {"Retry-After": str(retry_after_s)} if status in RETRY_LATER else {}
