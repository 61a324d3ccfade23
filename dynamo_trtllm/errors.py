"""Define every error that crosses a package boundary, as one class tree with stable codes.

A code is part of the wire format and a metric label, so it never changes. An error is `retryable` if another worker may
succeed with the same request; a retry is possible until the first token is sent. `http_server/errors.py` maps codes to
HTTP statuses.
"""

from __future__ import annotations

from typing import ClassVar, Final

from dynamo_trtllm.sanitize import mask_credentials, shorten

MESSAGE_CHARS: Final = 4_000
FIELD_CHARS: Final = 200


class DynamoError(Exception):
    """Base of all errors. The message says what is wrong and what to do.

    Message and field may quote client input. Each is shortened in its middle, to MESSAGE_CHARS and FIELD_CHARS
    characters. Passwords in addresses are masked.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str | None = None) -> None:
        message = mask_credentials(shorten(message, MESSAGE_CHARS))
        super().__init__(message)
        self.message = message
        self.field = field and shorten(field, FIELD_CHARS)  # the request or configuration field at fault, if any


class ConfigError(DynamoError):
    """The configuration is invalid. The process prints the error in one line and exits with status 2."""

    code = "config"


class InternalError(DynamoError):
    """An unexpected exception, converted by a catch-all: worker service, HTTP handlers, pair probes, renderers."""

    code = "internal"


# --- the caller's fault --------------------------------------------------------------------------------


class RequestError(DynamoError):
    """The caller must change the request."""

    code = "request"


class InvalidRequest(RequestError):
    """The request is malformed, or a field has an invalid value."""

    code = "invalid_request"


class UnsupportedParameter(InvalidRequest):
    """The request has a field that is not supported. The error names the field."""

    code = "unsupported_parameter"


class ContextTooLong(RequestError):
    """Prompt plus output would exceed the model's context length."""

    code = "context_length_exceeded"


class PayloadTooLarge(RequestError):
    """A message, HTTP body or stored value is larger than its limit."""

    code = "payload_too_large"


class HeadTooLarge(RequestError):
    """The HTTP request line and headers are too large."""

    code = "head_too_large"


class RequestTimeout(RequestError):
    """The client sent its request too slowly."""

    code = "request_timeout"


class UnsupportedMedia(RequestError):
    code = "unsupported_media"


class ModelNotFound(RequestError):
    code = "model_not_found"


class ResponseNotFound(RequestError):
    """The response store has no response with this id, or the response has expired."""

    code = "response_not_found"


class Cancelled(RequestError):
    """A client cancelled this response by its id."""

    code = "cancelled"


# --- come back later -----------------------------------------------------------------------------------


class CapacityError(DynamoError):
    """The request is valid, but no capacity is free. The caller may try again later."""

    code = "capacity"


class Overloaded(CapacityError):
    """A limit of a frontend or worker is reached."""

    code = "overloaded"
    retryable = True


class Draining(CapacityError):
    """The worker is shutting down and accepts no new requests."""

    code = "draining"
    retryable = True


class NoInstances(CapacityError):
    """The model has no usable worker for a phase of the request."""

    code = "no_instances"


# --- request plane -------------------------------------------------------------------------------------


class PlaneError(DynamoError):
    code = "plane"


class Unreachable(PlaneError):
    """No process replies at the subject."""

    code = "unreachable"
    retryable = True


class Disconnected(PlaneError):
    """The connection to the request plane is lost."""

    code = "disconnected"
    retryable = True


class DeadlineExceeded(PlaneError):
    """The request's deadline passed."""

    code = "deadline"


class StreamIncomplete(PlaneError):
    """Frames are missing, or a stream ended without a terminal chunk."""

    code = "incomplete"
    retryable = True


class BadFrame(PlaneError):
    """A message can't be decoded."""

    code = "bad_frame"


class VersionMismatch(PlaneError):
    """The wire versions of frontend and worker differ by more than 1."""

    code = "version_mismatch"
    retryable = True


# --- KV transfer: the frontend repeats the prefill call once -------------------------------------------


class KvTransferError(DynamoError):
    code = "handoff"
    retryable = True


class TransferExpired(KvTransferError):
    """The KV expired before it was fetched."""

    code = "ticket_expired"


class TransferMismatch(KvTransferError):
    """The KV transfer parameters do not fit the decode worker or the request."""

    code = "ticket_mismatch"


class TransferTimeout(KvTransferError):
    """The KV transfer did not finish in time."""

    code = "handoff_timeout"


class TransferFailed(KvTransferError):
    code = "transfer"


class NonFiniteKv(TransferFailed):
    """The received KV contains NaN or infinity."""

    code = "non_finite_kv"


# --- engine --------------------------------------------------------------------------------------------


class EngineError(DynamoError):
    code = "engine"


class EngineNotReady(EngineError):
    """The engine is not started yet, or the frontend is still loading the model's files."""

    code = "not_ready"
    retryable = True


class RequestRejected(EngineError):
    """The engine rejected this request. It continues to run other requests."""

    code = "engine_refused"


class MigrationFailed(EngineError):
    """The stream broke and can't be continued on another worker."""

    code = "not_migratable"


class NonFinite(EngineError):
    """The model's output for this request is NaN or infinite. Other requests of the engine continue."""

    code = "non_finite"
    retryable = True


class EngineFailed(EngineError):
    """The engine can't serve requests any more. The worker drains, deregisters and exits."""

    code = "engine_failed"
    retryable = True


def error_classes() -> dict[str, type[DynamoError]]:
    """Return all classes of the tree by code."""
    classes: dict[str, type[DynamoError]] = {}
    stack: list[type[DynamoError]] = [DynamoError]
    while stack:
        cls = stack.pop()
        classes[cls.code] = cls
        stack.extend(cls.__subclasses__())
    return classes


def from_code(code: str, message: str, field: str | None = None) -> DynamoError:
    """Return the error for a code and message from the wire. An unknown code becomes `InternalError`."""
    return error_classes().get(code, InternalError)(message, field=field)


def install_hint(extra: str) -> str:
    """Return, for an error text, how to install an optional dependency. The package is not on a package index."""
    return f"run pip install -e '.[{extra}]' in a checkout of dynamo_trtllm"
