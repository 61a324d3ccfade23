"""Every error that crosses a package boundary, as one tree with stable codes.

The code is wire format and metric label: it is never renamed. `retryable` says whether the same request may
succeed on another worker before a token was sent. HTTP statuses are not here: they are in `http_server/errors.py`.
"""

from __future__ import annotations

from typing import ClassVar, Final

from dynamo_trtllm.sanitize import mask_credentials, shorten

MESSAGE_CHARS: Final = 4_000
FIELD_CHARS: Final = 200


class DynamoError(Exception):
    """Root of the tree. The message says what to change; the cause is kept with `raise … from`.

    Message and field may quote what a client sent. Their middle is cut out beyond MESSAGE_CHARS and FIELD_CHARS
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
    """The configuration can't work. Printed in one line; the process exits with 2."""

    code = "config"


class InternalError(DynamoError):
    """What an unexpected exception becomes at a catch-all: worker service, ASGI handler, canaries, model renderers."""

    code = "internal"


# --- the caller's fault --------------------------------------------------------------------------------


class RequestError(DynamoError):
    """The caller must change the request."""

    code = "request"


class InvalidRequest(RequestError):
    code = "invalid_request"


class UnsupportedParameter(InvalidRequest):
    """A field we do not honor is refused by its name, never ignored."""

    code = "unsupported_parameter"


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class PayloadTooLarge(RequestError):
    code = "payload_too_large"


class HeadTooLarge(RequestError):
    """Of the request line and headers."""

    code = "head_too_large"


class RequestTimeout(RequestError):
    """The client sent its request too slowly."""

    code = "request_timeout"


class UnsupportedMedia(RequestError):
    code = "unsupported_media"


class ModelNotFound(RequestError):
    code = "model_not_found"


class ResponseNotFound(RequestError):
    """No stored response has this id, or no longer."""

    code = "response_not_found"


class Cancelled(RequestError):
    """Somebody asked for the end of this answer by its id."""

    code = "cancelled"


# --- come back later -----------------------------------------------------------------------------------


class CapacityError(DynamoError):
    """The request is valid, but there is no capacity for it now."""

    code = "capacity"


class Overloaded(CapacityError):
    code = "overloaded"
    retryable = True


class Draining(CapacityError):
    code = "draining"
    retryable = True


class NoInstances(CapacityError):
    code = "no_instances"


# --- request plane -------------------------------------------------------------------------------------


class PlaneError(DynamoError):
    code = "plane"


class Unreachable(PlaneError):
    """No process answers at the subject."""

    code = "unreachable"
    retryable = True


class Disconnected(PlaneError):
    """The connection to the request plane was lost while a stream ran."""

    code = "disconnected"
    retryable = True


class DeadlineExceeded(PlaneError):
    code = "deadline"


class StreamIncomplete(PlaneError):
    """Frames are missing, or a stream ended with no terminal chunk."""

    code = "incomplete"
    retryable = True


class BadFrame(PlaneError):
    code = "bad_frame"


class VersionMismatch(PlaneError):
    """The wire versions of frontend and worker differ by more than 1."""

    code = "version_mismatch"
    retryable = True


# --- KV transfer: repeat the prefill call, once --------------------------------------------------------


class KvTransferError(DynamoError):
    code = "handoff"
    retryable = True


class TransferExpired(KvTransferError):
    code = "ticket_expired"


class TransferMismatch(KvTransferError):
    code = "ticket_mismatch"


class TransferTimeout(KvTransferError):
    code = "handoff_timeout"


class TransferFailed(KvTransferError):
    code = "transfer"


class NonFiniteKv(TransferFailed):
    """The KV that arrived has NaN or infinity."""

    code = "non_finite_kv"


# --- engine --------------------------------------------------------------------------------------------


class EngineError(DynamoError):
    code = "engine"


class EngineNotReady(EngineError):
    code = "not_ready"
    retryable = True


class RequestRejected(EngineError):
    """The engine rejected this request; the engine itself is fine."""

    code = "engine_refused"


class MigrationFailed(EngineError):
    """The stream broke and can't be continued on another worker."""

    code = "not_migratable"


class NonFinite(EngineError):
    """The model's output for this request is NaN or infinite; the other requests of the engine go on."""

    code = "non_finite"
    retryable = True


class EngineFailed(EngineError):
    """The engine is not fit to serve: the worker drains and its lease goes."""

    code = "engine_failed"
    retryable = True


def error_classes() -> dict[str, type[DynamoError]]:
    """All classes of the tree by code."""
    found: dict[str, type[DynamoError]] = {}
    stack: list[type[DynamoError]] = [DynamoError]
    while stack:
        cls = stack.pop()
        found[cls.code] = cls
        stack.extend(cls.__subclasses__())
    return found


def from_code(code: str, message: str, field: str | None = None) -> DynamoError:
    """The error that was sent over the wire as (code, message); an unknown code becomes `InternalError`."""
    return error_classes().get(code, InternalError)(message, field=field)


def install_hint(extra: str) -> str:
    """Return how to install an optional part of this package, for an error. The package is on no package index."""
    return f"run pip install -e '.[{extra}]' in a checkout of dynamo_trtllm"
