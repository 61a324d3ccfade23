"""Map error classes to HTTP status and OpenAI error type, and build error responses."""

from __future__ import annotations

from typing import Final, NamedTuple

from dynamo_trtllm import errors
from dynamo_trtllm.api.response_schemas import ErrorObject, ErrorType, error_body
from dynamo_trtllm.errors import DynamoError

INVALID: Final = "invalid_request_error"
LIMITED: Final = "rate_limit_error"
UNAVAILABLE: Final = "service_unavailable_error"
SERVER: Final = "server_error"
RETRY_AFTER_S = 1
RETRY_LATER = frozenset({429, 503})  # statuses with a Retry-After header


class ErrorSpec(NamedTuple):
    status: int
    type: ErrorType


TABLE: dict[type[DynamoError], ErrorSpec] = {
    DynamoError: ErrorSpec(500, SERVER),
    errors.ConfigError: ErrorSpec(500, SERVER),
    errors.InternalError: ErrorSpec(500, SERVER),
    errors.RequestError: ErrorSpec(400, INVALID),
    errors.InvalidRequest: ErrorSpec(400, INVALID),
    errors.UnsupportedParameter: ErrorSpec(400, INVALID),
    errors.ContextTooLong: ErrorSpec(400, INVALID),
    errors.PayloadTooLarge: ErrorSpec(413, INVALID),
    errors.HeadTooLarge: ErrorSpec(431, INVALID),
    errors.RequestTimeout: ErrorSpec(408, INVALID),
    errors.UnsupportedMedia: ErrorSpec(415, INVALID),
    errors.ModelNotFound: ErrorSpec(404, INVALID),
    errors.ResponseNotFound: ErrorSpec(404, INVALID),
    errors.Cancelled: ErrorSpec(409, INVALID),
    errors.CapacityError: ErrorSpec(503, UNAVAILABLE),
    errors.Overloaded: ErrorSpec(429, LIMITED),
    errors.Draining: ErrorSpec(503, UNAVAILABLE),
    errors.NoInstances: ErrorSpec(503, UNAVAILABLE),
    errors.PlaneError: ErrorSpec(502, SERVER),
    errors.Unreachable: ErrorSpec(503, UNAVAILABLE),
    errors.Disconnected: ErrorSpec(503, UNAVAILABLE),
    errors.DeadlineExceeded: ErrorSpec(504, SERVER),
    errors.StreamIncomplete: ErrorSpec(502, SERVER),
    errors.BadFrame: ErrorSpec(502, SERVER),
    errors.VersionMismatch: ErrorSpec(502, SERVER),
    errors.KvTransferError: ErrorSpec(502, SERVER),
    errors.TransferExpired: ErrorSpec(502, SERVER),
    errors.TransferMismatch: ErrorSpec(502, SERVER),
    errors.TransferTimeout: ErrorSpec(504, SERVER),
    errors.TransferFailed: ErrorSpec(502, SERVER),
    errors.NonFiniteKv: ErrorSpec(502, SERVER),
    errors.EngineError: ErrorSpec(500, SERVER),
    errors.EngineNotReady: ErrorSpec(503, UNAVAILABLE),
    errors.RequestRejected: ErrorSpec(400, INVALID),
    errors.MigrationFailed: ErrorSpec(502, SERVER),
    errors.NonFinite: ErrorSpec(500, SERVER),
    errors.EngineFailed: ErrorSpec(500, SERVER),
}


class ErrorResponse(NamedTuple):
    status: int
    body: ErrorObject
    headers: dict[str, str]


def to_response(error: DynamoError, retry_after_s: int = RETRY_AFTER_S) -> ErrorResponse:
    """Return the response for an error. A class that is not in the table uses its parent's row."""
    spec = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    body = error_body(error.message, type=spec.type, param=error.field, code=error.code)
    return ErrorResponse(spec.status, body, retry_headers(spec.status, retry_after_s))


def internal() -> errors.InternalError:
    """Return the error for an unexpected exception."""
    return errors.InternalError("an internal error occurred; see the server's log for this request id")


def retry_headers(status: int, retry_after_s: int = RETRY_AFTER_S) -> dict[str, str]:
    """Return the Retry-After header if the status has one."""
    return {"Retry-After": str(retry_after_s)} if status in RETRY_LATER else {}
