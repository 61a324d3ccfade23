"""Map error classes to HTTP statuses, and build error responses.

Their bodies have the form of an API (`frontend/api/error_bodies.py`), which the caller passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from dynamo_trtllm.protocol import errors
from dynamo_trtllm.protocol.errors import DynamoError

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
        errors.ExceedsKeyLimit,
    ),
    401: (errors.InvalidApiKey,),
    403: (errors.PermissionDenied,),
    404: (errors.ModelNotFound, errors.ResponseNotFound),
    408: (errors.RequestTimeout,),
    409: (errors.Cancelled,),
    413: (errors.PayloadTooLarge,),
    415: (errors.UnsupportedMedia,),
    422: (errors.QueryOfDeath,),  # clients repeat requests after a status from 500 on
    429: (
        errors.Overloaded,
        errors.KvTransfersFull,
        errors.RateLimitExceeded,
        errors.DeadlineUnreachable,
        errors.SloUnreachable,
    ),
    431: (errors.HeadTooLarge,),
    500: (
        DynamoError,
        errors.ConfigError,
        errors.InternalError,
        errors.HookFailed,
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
        errors.TransferRejected,
        errors.TransferFailed,
        errors.NonFiniteKv,
    ),
    503: (
        errors.CapacityError,
        errors.Draining,
        errors.NoInstances,
        errors.EngineNotReady,
        errors.Unreachable,
        errors.UserRejected,
        errors.NoListener,
        errors.Disconnected,
        errors.WorkerDied,
    ),
    504: (errors.DeadlineExceeded, errors.TransferTimeout, errors.HookTimeout),
}
STATUS: Final = {cls: status for status, classes in _BY_STATUS.items() for cls in classes}


class ErrorForm(Protocol):
    """The form of errors in an API."""

    def __call__(
        self, status: int, message: str, *, param: str | None = None, code: str, request_id: str
    ) -> Mapping[str, Any]:
        """Return the body of an error response."""


class ErrorResponse(NamedTuple):
    status: int
    body: Mapping[str, Any]
    headers: dict[str, str]


def to_response(
    error: DynamoError,
    form: ErrorForm,
    *,
    request_id: str = "",
    retry_after_s: int = RETRY_AFTER_S,
) -> ErrorResponse:
    """Return the response for an error.

    A class that is not in the table has its parent's status.
    """
    status = next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)
    body = form(status, error.message, param=error.field, code=error.code, request_id=request_id)
    if isinstance(error, errors.CapacityError) and error.retry_after_s is not None:
        retry_after_s = error.retry_after_s
    headers = retry_headers(status, retry_after_s)
    if isinstance(error, errors.RateLimitExceeded):
        headers |= error.headers
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 409:
        # The SDKs of OpenAI and Anthropic would send the cancelled request again.
        headers["X-Should-Retry"] = "false"
    return ErrorResponse(status, body, headers)


def retry_headers(status: int, retry_after_s: int = RETRY_AFTER_S) -> dict[str, str]:
    """Return the Retry-After header if the status has one."""
    if status not in RETRY_LATER:
        return {}
    return {"Retry-After": str(retry_after_s)}
