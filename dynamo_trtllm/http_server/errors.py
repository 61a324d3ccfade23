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

_BY_STATUS: Final[dict[int, tuple[type[DynamoError], ...]]] = {
    400: (
        *(errors.RequestError, errors.InvalidRequest, errors.UnsupportedParameter, errors.ContextTooLong),
        errors.RequestRejected,
    ),
    404: (errors.ModelNotFound, errors.ResponseNotFound),
    408: (errors.RequestTimeout,),
    409: (errors.Cancelled,),
    413: (errors.PayloadTooLarge,),
    415: (errors.UnsupportedMedia,),
    429: (errors.Overloaded,),
    431: (errors.HeadTooLarge,),
    500: (
        *(DynamoError, errors.ConfigError, errors.InternalError),
        *(errors.EngineError, errors.EngineFailed, errors.NonFinite),
    ),
    502: (
        *(errors.PlaneError, errors.StreamIncomplete, errors.BadFrame, errors.VersionMismatch, errors.MigrationFailed),
        *(errors.KvTransferError, errors.TransferExpired, errors.TransferMismatch, errors.TransferFailed),
        errors.NonFiniteKv,
    ),
    503: (
        *(errors.CapacityError, errors.Draining, errors.NoInstances, errors.EngineNotReady),
        *(errors.Unreachable, errors.Disconnected),
    ),
    504: (errors.DeadlineExceeded, errors.TransferTimeout),
}
STATUS: Final = {cls: status for status, classes in _BY_STATUS.items() for cls in classes}


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
