"""Map error classes to HTTP statuses, and build error responses. The status decides OpenAI's error type."""

from __future__ import annotations

from typing import Final, NamedTuple

from dynamo_trtllm import errors
from dynamo_trtllm.api.response_schemas import ErrorObject, ErrorType, error_body
from dynamo_trtllm.errors import DynamoError

INVALID: Final = "invalid_request_error"
_OTHER_TYPES: Final[dict[int, ErrorType]] = {429: "rate_limit_error", 503: "service_unavailable_error"}
RETRY_AFTER_S = 1
RETRY_LATER = frozenset({429, 503})  # statuses with a Retry-After header


STATUS: dict[type[DynamoError], int] = {
    DynamoError: 500,
    errors.ConfigError: 500,
    errors.InternalError: 500,
    errors.RequestError: 400,
    errors.InvalidRequest: 400,
    errors.UnsupportedParameter: 400,
    errors.ContextTooLong: 400,
    errors.PayloadTooLarge: 413,
    errors.HeadTooLarge: 431,
    errors.RequestTimeout: 408,
    errors.UnsupportedMedia: 415,
    errors.ModelNotFound: 404,
    errors.ResponseNotFound: 404,
    errors.Cancelled: 409,
    errors.CapacityError: 503,
    errors.Overloaded: 429,
    errors.Draining: 503,
    errors.NoInstances: 503,
    errors.PlaneError: 502,
    errors.Unreachable: 503,
    errors.Disconnected: 503,
    errors.DeadlineExceeded: 504,
    errors.StreamIncomplete: 502,
    errors.BadFrame: 502,
    errors.VersionMismatch: 502,
    errors.KvTransferError: 502,
    errors.TransferExpired: 502,
    errors.TransferMismatch: 502,
    errors.TransferTimeout: 504,
    errors.TransferFailed: 502,
    errors.NonFiniteKv: 502,
    errors.EngineError: 500,
    errors.EngineNotReady: 503,
    errors.RequestRejected: 400,
    errors.MigrationFailed: 502,
    errors.NonFinite: 500,
    errors.EngineFailed: 500,
}


class ErrorResponse(NamedTuple):
    status: int
    body: ErrorObject
    headers: dict[str, str]


def to_response(error: DynamoError, retry_after_s: int = RETRY_AFTER_S) -> ErrorResponse:
    """Return the response for an error. A class that is not in the table has its parent's status."""
    status = next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)
    error_type = _OTHER_TYPES.get(status) or (INVALID if status < 500 else "server_error")
    body = error_body(error.message, type=error_type, param=error.field, code=error.code)
    return ErrorResponse(status, body, retry_headers(status, retry_after_s))


def retry_headers(status: int, retry_after_s: int = RETRY_AFTER_S) -> dict[str, str]:
    """Return the Retry-After header if the status has one."""
    return {"Retry-After": str(retry_after_s)} if status in RETRY_LATER else {}
