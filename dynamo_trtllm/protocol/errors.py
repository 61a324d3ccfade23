"""Define every error that crosses a package boundary, as one class tree with stable codes.

A code is part of the wire format and a metric label, so it never changes. An error is `retryable`
if another worker may succeed with the same request, or with the rest of it after the tokens that
the client has. `protocol/http_status.py` maps codes to HTTP statuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from dynamo_trtllm.protocol.sanitize import mask_credentials, shorten

MESSAGE_CHARS: Final = 4_000
FIELD_CHARS: Final = 200
CLASSES: Final[dict[str, type[DynamoError]]] = {}  # the classes of the tree, by code


class DynamoError(Exception):
    """Base of all errors. The message says what is wrong and what to do.

    Message and field may quote client input. Each is shortened in its middle, to MESSAGE_CHARS and
    FIELD_CHARS characters. Passwords in addresses are masked.

    Attributes:
        code: stable name of the kind of error, for programs.
        retryable: another worker may succeed with the same request.
        message: text of the error.
        field: setting, or field of a request, at fault; None: not known.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls, code: str | None = None, retryable: bool | None = None) -> None:
        cls.code = cls.code if code is None else code
        cls.retryable = cls.retryable if retryable is None else retryable
        CLASSES.setdefault(cls.code, cls)

    def __init__(self, message: str, *, field: str | None = None) -> None:
        message = mask_credentials(shorten(message, MESSAGE_CHARS))
        super().__init__(message)
        self.message = message
        self.field = field and shorten(field, FIELD_CHARS)


CLASSES[DynamoError.code] = DynamoError


class ConfigError(DynamoError, code="config"):
    """The configuration is invalid.

    The process prints the error in one line and exits with status 2.
    """


class InternalError(DynamoError, code="internal"):
    """An unexpected exception, converted by a catch-all: worker service, HTTP handlers, pair
    probes, renderers.
    """


class HookFailed(DynamoError, code="hook_failed"):
    """Middleware, or a route that a program added to its frontend, failed."""


class HookTimeout(HookFailed, code="hook_timeout"):
    """Middleware, or a route that a program added to its frontend, took too long."""


# --- the caller's fault ---------------------------------------------------------------------------


class RequestError(DynamoError, code="request"):
    """The caller must change the request."""


class InvalidRequest(RequestError, code="invalid_request"):
    """The request is malformed, or a field has an invalid value."""


class UnsupportedParameter(InvalidRequest, code="unsupported_parameter"):
    """The request has a field that is not supported. The error names the field."""


class ContextTooLong(RequestError, code="context_length_exceeded"):
    """Prompt plus output would exceed the model's context length."""


class PayloadTooLarge(RequestError, code="payload_too_large"):
    """A message, HTTP body or stored value is larger than its limit."""


class HeadTooLarge(RequestError, code="head_too_large"):
    """The HTTP request line and headers are too large."""


class RequestTimeout(RequestError, code="request_timeout"):
    """The client sent its request too slowly."""


class UnsupportedMedia(RequestError, code="unsupported_media"):
    """The content type of the request body is not supported."""


class ModelNotFound(RequestError, code="model_not_found"):
    """No worker serves this model, or the worker that was called serves another one."""


class ResponseNotFound(RequestError, code="response_not_found"):
    """The response store has no response with this id, or the response has expired."""


class InvalidApiKey(RequestError, code="invalid_api_key"):
    """The request has no API key, or not one that is valid now."""


class PermissionDenied(RequestError, code="permission_denied"):
    """The API key does not allow this request."""


class ExceedsKeyLimit(RequestError, code="exceeds_key_limit"):
    """The request alone is more than a limit of its API key allows, so it never fits."""


class Cancelled(RequestError, code="cancelled"):
    """A client cancelled this response by its id."""


# --- come back later ------------------------------------------------------------------------------


class CapacityError(DynamoError, code="capacity"):
    """The request is valid, but no capacity is free. The caller may try again later.

    Attributes:
        retry_after_s: seconds until the caller may try again; None: not known.
    """

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class Overloaded(CapacityError, code="overloaded", retryable=True):
    """A limit of a frontend or worker is reached."""


class KvTransfersFull(Overloaded, code="kv_transfers_full"):
    """An elastic worker holds as much KV for other workers as it may.

    It takes other calls, and other workers may take this one.
    """


class RateLimitExceeded(CapacityError, code="rate_limit_exceeded"):
    """A limit of an API key is reached.

    Attributes:
        headers: of the response, which say what is left of the limits.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.headers = headers or {}


class DeadlineUnreachable(CapacityError, code="deadline_unreachable"):
    """The request would wait for longer than it may take, so it did not begin to wait."""


class SloUnreachable(CapacityError, code="slo_unreachable"):
    """No path is predicted to keep the limits of the request's times.

    Only with `--slo-policy reject`.
    """


class Draining(CapacityError, code="draining", retryable=True):
    """The worker is shutting down and accepts no new requests."""


class NoInstances(CapacityError, code="no_instances"):
    """The model has no usable worker for a phase of the request."""


# --- request plane --------------------------------------------------------------------------------


class PlaneError(DynamoError, code="request_plane"):
    """A message did not reach its receiver, or its reply did not come."""


class Unreachable(PlaneError, code="unreachable", retryable=True):
    """No process replies at the subject."""


class UserRejected(Unreachable):
    """etcd or NATS answers, and rejects the user of this process."""


class NoListener(Unreachable):
    """No process listens at the subject, so the message was not delivered."""


class Disconnected(PlaneError, code="disconnected", retryable=True):
    """The connection to the request plane is lost."""


class WorkerDied(Disconnected):
    """The worker received the call, and then its process ended or lost its connection.

    Not raised if it hangs.
    """


class DeadlineExceeded(PlaneError, code="deadline"):
    """The request's deadline passed."""

    @classmethod
    def while_generating(cls) -> DeadlineExceeded:
        """Return the error of a request that a worker had begun. It says what a client can do."""
        return cls(
            "the request's deadline passed before its answer was complete; lower max_tokens, or"
            " allow more time with the field timeout or with --request-timeout-s of the frontend"
        )


class StreamIncomplete(PlaneError, code="incomplete", retryable=True):
    """Frames are missing, or a stream ended without a terminal chunk."""


class BadFrame(PlaneError, code="bad_frame"):
    """A message can't be decoded."""


class VersionMismatch(PlaneError, code="version_mismatch", retryable=True):
    """The wire versions of frontend and worker differ by more than 1."""


# --- KV transfer: the frontend repeats the prefill call once --------------------------------------


class KvTransferError(DynamoError, code="kv_transfer", retryable=True):
    """The KV of a prompt did not reach the decode worker."""


class TransferExpired(KvTransferError, code="transfer_expired"):
    """The KV expired before it was fetched."""


class TransferMismatch(KvTransferError, code="transfer_mismatch"):
    """The KV transfer parameters do not fit the decode worker or the request."""


class TransferRejected(KvTransferError, code="transfer_rejected"):
    """KV transfer parameters are forged, used already, or not for this worker or request.

    Nothing was allocated for them, and the KV stays with its prefill worker.
    """


class TransferTimeout(KvTransferError, code="transfer_timeout"):
    """The KV transfer did not finish in time."""


class TransferFailed(KvTransferError, code="transfer_failed"):
    """The transfer backend failed."""


class NonFiniteKv(TransferFailed, code="non_finite_kv"):
    """The received KV contains NaN or infinity."""


# --- engine ---------------------------------------------------------------------------------------


class EngineError(DynamoError, code="engine"):
    """The engine did not run the request."""


class EngineNotReady(EngineError, code="not_ready", retryable=True):
    """The engine is not started yet, or the frontend is still loading the model's files."""


class RequestRejected(EngineError, code="engine_rejected"):
    """The engine rejected this request. It continues to run other requests."""


class FormatTooComplex(RequestRejected, code="format_too_complex"):
    """Compiling the request's output format takes too much time, memory or stack."""


class MigrationFailed(EngineError, code="not_migratable"):
    """The stream broke and can't be continued on another worker."""


class QueryOfDeath(EngineError, code="query_of_death"):
    """Two workers ended while they ran this request, or an earlier one with the same prompt.

    It is not tried again.
    """


class NonFinite(EngineError, code="non_finite", retryable=True):
    """The model's output for this request is NaN or infinite.

    Other requests of the engine continue.
    """


class EngineFailed(EngineError, code="engine_failed", retryable=True):
    """The engine can't serve requests any more. The worker drains, deregisters and exits."""


def is_worker_unavailable(error: DynamoError) -> bool:
    """Return whether the worker took no call, because it is draining or unreachable."""
    return isinstance(error, Draining | Unreachable)


def from_code(code: str, message: str, field: str | None = None) -> DynamoError:
    """Return the error for a code and message from the wire.

    An unknown code becomes `InternalError`.
    """
    return CLASSES.get(code, InternalError)(message, field=field)


def install_hint(extra: str) -> str:
    """Return, for an error text, how to install an optional dependency.

    The package is not on a package index.
    """
    return f"run pip install -e '.[{extra}]' in a checkout of dynamo_trtllm"
