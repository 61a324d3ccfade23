"""Map error classes to HTTP statuses, and build error responses.

The status decides the error's type in each API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from dynamo_trtllm import errors
from dynamo_trtllm.api.response_schemas import (
    ErrorType,
    MessagesErrorObject,
    MessagesErrorType,
    error_body,
    messages_error_body,
)
from dynamo_trtllm.errors import DynamoError

INVALID: Final = "invalid_request_error"
_OTHER_TYPES: Final[dict[int, ErrorType]] = {
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
RETRY_AFTER_S = 1
RETRY_LATER = frozenset({429, 503})  # statuses with a Retry-After header

_BY_STATUS: Final[dict[int, tuple[type[DynamoError], ...]]] = {
    400: (
        errors.RequestError,
        errors.InvalidRequest,
        errors.UnsupportedParameter,
        errors.ContextTooLong,
        errors.RequestRejected,
        errors.FormatTooComplex,
    ),
    404: (errors.ModelNotFound, errors.ResponseNotFound),
    408: (errors.RequestTimeout,),
    409: (errors.Cancelled,),
    413: (errors.PayloadTooLarge,),
    415: (errors.UnsupportedMedia,),
    422: (errors.QueryOfDeath,),  # clients repeat requests after a status from 500 on
    429: (errors.Overloaded,),
    431: (errors.HeadTooLarge,),
    500: (
        DynamoError,
        errors.ConfigError,
        errors.InternalError,
        errors.EngineError,
        errors.EngineFailed,
        errors.NonFinite,
    ),
    502: (
        errors.PlaneError,
        errors.StreamIncomplete,
        errors.BadFrame,
        errors.VersionMismatch,
        errors.MigrationFailed,
        errors.KvTransferError,
        errors.TransferExpired,
        errors.TransferMismatch,
        errors.TransferFailed,
        errors.NonFiniteKv,
    ),
    503: (
        errors.CapacityError,
        errors.Draining,
        errors.NoInstances,
        errors.EngineNotReady,
        errors.Unreachable,
        errors.NoListener,
        errors.Disconnected,
        errors.WorkerDied,
    ),
    504: (errors.DeadlineExceeded, errors.TransferTimeout),
}
STATUS: Final = {cls: status for status, classes in _BY_STATUS.items() for cls in classes}


class ErrorForm(Protocol):
    """The form of errors in an API."""

    def __call__(
        self, status: int, message: str, *, param: str | None = None, code: str, request_id: str
    ) -> Mapping[str, Any]:
        """Return the body of an error response."""


def openai_error(
    status: int, message: str, *, param: str | None = None, code: str, request_id: str
) -> Mapping[str, Any]:
    """Return an error in the form of OpenAI's API, which has no request id."""
    usual_type: ErrorType = INVALID if status < 500 else "server_error"
    error_type = _OTHER_TYPES.get(status, usual_type)
    return error_body(message, type=error_type, param=param, code=code)


_MESSAGES_TYPES: Final[dict[int, MessagesErrorType]] = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(
    status: int, message: str, *, param: str | None = None, code: str, request_id: str
) -> MessagesErrorObject:
    """Return an error in the form of Anthropic's Messages API."""
    usual_type: MessagesErrorType = INVALID if status < 500 else "api_error"
    error_type = _MESSAGES_TYPES.get(status, usual_type)
    if code == errors.ContextTooLong.code:
        message = f"prompt is too long: {message}"  # Claude Code then compacts the conversation
    return messages_error_body(
        message,
        type=error_type,
        param=param,
        code=code,
        request_id=request_id,
    )


class ErrorResponse(NamedTuple):
    status: int
    body: Mapping[str, Any]
    headers: dict[str, str]


def to_response(
    error: DynamoError,
    retry_after_s: int = RETRY_AFTER_S,
    form: ErrorForm = openai_error,
    request_id: str = "",
) -> ErrorResponse:
    """Return the response for an error.

    A class that is not in the table has its parent's status.
    """
    status = next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)
    body = form(status, error.message, param=error.field, code=error.code, request_id=request_id)
    return ErrorResponse(status, body, retry_headers(status, retry_after_s))


def retry_headers(status: int, retry_after_s: int = RETRY_AFTER_S) -> dict[str, str]:
    """Return the Retry-After header if the status has one."""
    if status not in RETRY_LATER:
        return {}
    return {"Retry-After": str(retry_after_s)}
