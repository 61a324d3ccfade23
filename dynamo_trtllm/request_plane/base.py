"""Define the request-plane interface. `inproc` (in-process) and `nats` implement it; both pass the contract tests."""

from __future__ import annotations

from typing import Protocol

from dynamo_trtllm.messages import Control, GenerateRequest
from dynamo_trtllm.streams import Generator, OnEvent, StreamHandle


class Service(Generator, Protocol):
    """The calls that a worker answers at its subject.

    The plane cancels a stream whose caller cancels it or is gone, also an ended one that still holds KV.
    """

    async def control(self, verb: Control) -> bytes:
        """Run a control verb and return the encoded reply, whose type depends on the verb.

        Raises:
            DynamoError: the caller gets the same error.
        """
        ...


class ServerHandle(Protocol):
    """One service that is served at one subject."""

    async def stop_accepting(self) -> None:
        """Reject new requests with `Unreachable` or `Draining`. Running streams and control verbs continue."""
        ...

    async def finished(self) -> None:
        """Wait until no stream runs."""
        ...

    @property
    def running(self) -> int:
        """Return the number of running streams."""
        ...

    async def aclose(self) -> None:
        """Stop serving and end running streams; their callers get `Draining`. Idempotent."""
        ...


class Plane(Protocol):
    """A connection to the request plane, for workers (`serve`) and for their callers."""

    async def serve(self, subject: str, service: Service) -> ServerHandle:
        """Serve requests at `subject`, and control verbs at its control subject, until the handle is closed."""
        ...

    def generate(self, subject: str, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        """Start one call. Its chunks come as events, in order and without gaps; see `streams.Generator.generate`.

        Cancelling the stream sends a cancel to the worker, without waiting.

        Args:
            subject: request-plane address of a worker's `generate`.
            request: the call.
            on_event: receives the events.

        Errors that end a stream, beside those of the worker, which come as the same class:
            Unreachable: no worker acknowledges the request in time.
            StreamIncomplete: a frame is missing, or the stream ends without a terminal chunk.
            Disconnected: the request plane is lost.
            DeadlineExceeded: the request's deadline passes.
        """
        ...

    async def control(self, subject: str, verb: Control, *, timeout_s: float = 5.0) -> bytes:
        """Send one control verb to the instance with this generate subject and return its encoded reply.

        Raises:
            DynamoError: like `generate`; KvTransferError for a verb about a KV transfer.
        """
        ...

    def unavailable_reason(self) -> str | None:
        """Return, as text for users, why no request can be sent now. None: no reason is known."""
        ...

    async def aclose(self) -> None:
        """Close all servers and streams and the transport. Idempotent."""
        ...
