"""The one table from error class to HTTP status and OpenAI error type, and the answer built from it."""

from __future__ import annotations

from typing import NamedTuple

from dynamo_trtllm import errors
from dynamo_trtllm.api.errors import ErrorBody, error_body
from dynamo_trtllm.errors import DynamoError

INVALID = "invalid_request_error"
LIMITED = "rate_limit_error"
UNAVAILABLE = "service_unavailable_error"
SERVER = "server_error"
RETRY_AFTER_S = 1
RETRY_LATER = frozenset({429, 503})  # statuses that come with Retry-After


class Row(NamedTuple):
    status: int
    type: str


TABLE: dict[type[DynamoError], Row] = {
    DynamoError: Row(500, SERVER),
    errors.ConfigError: Row(500, SERVER),
    errors.InternalError: Row(500, SERVER),
    errors.RequestError: Row(400, INVALID),
    errors.InvalidRequest: Row(400, INVALID),
    errors.UnsupportedParameter: Row(400, INVALID),
    errors.ContextTooLong: Row(400, INVALID),
    errors.PayloadTooLarge: Row(413, INVALID),
    errors.HeadTooLarge: Row(431, INVALID),
    errors.RequestTimeout: Row(408, INVALID),
    errors.UnsupportedMedia: Row(415, INVALID),
    errors.ModelNotFound: Row(404, INVALID),
    errors.ResponseNotFound: Row(404, INVALID),
    errors.Cancelled: Row(409, INVALID),
    errors.CapacityError: Row(503, UNAVAILABLE),
    errors.Overloaded: Row(429, LIMITED),
    errors.Draining: Row(503, UNAVAILABLE),
    errors.NoInstances: Row(503, UNAVAILABLE),
    errors.PlaneError: Row(502, SERVER),
    errors.Unreachable: Row(503, UNAVAILABLE),
    errors.Disconnected: Row(503, UNAVAILABLE),
    errors.DeadlineExceeded: Row(504, SERVER),
    errors.StreamIncomplete: Row(502, SERVER),
    errors.BadFrame: Row(502, SERVER),
    errors.VersionMismatch: Row(502, SERVER),
    errors.HandoffError: Row(502, SERVER),
    errors.TicketExpired: Row(502, SERVER),
    errors.TicketMismatch: Row(502, SERVER),
    errors.HandoffTimeout: Row(504, SERVER),
    errors.TransferFailed: Row(502, SERVER),
    errors.NonFiniteKv: Row(502, SERVER),
    errors.EngineError: Row(500, SERVER),
    errors.EngineNotReady: Row(503, UNAVAILABLE),
    errors.EngineRefused: Row(400, INVALID),
    errors.NotMigratable: Row(502, SERVER),
    errors.NonFinite: Row(500, SERVER),
    errors.EngineFailed: Row(500, SERVER),
}


class Answer(NamedTuple):
    status: int
    body: ErrorBody
    headers: dict[str, str]


def answer(error: DynamoError, retry_after_s: int = RETRY_AFTER_S) -> Answer:
    """What a client is told. A class without a row of its own takes its parent's."""
    row = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    body = error_body(error.message, type=row.type, param=error.field, code=error.code)
    headers = retry_headers(row.status, retry_after_s)
    if isinstance(error, errors.RequestTimeout):
        headers["Connection"] = "close"  # the rest of the request is still to come
    return Answer(row.status, body, headers)


def retry_headers(status: int, retry_after_s: int = RETRY_AFTER_S) -> dict[str, str]:
    """Whatever else the answer holds."""
    return {"Retry-After": str(retry_after_s)} if status in RETRY_LATER else {}
