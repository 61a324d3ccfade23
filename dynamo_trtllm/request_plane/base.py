"""The request-plane interface. Implementations: `inproc` (in-process) and `nats`; both pass the same contract tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol, TypeAlias, runtime_checkable

from dynamo_trtllm.messages import Chunk, Control, GenerateRequest

Sink: TypeAlias = Callable[[Chunk], bool]
"""Takes a chunk within the call, or says False and has changed nothing: the stream yields that chunk then."""


class Service(Protocol):
    """What a worker offers at its subject."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """As `Engine.generate`. Closed by the plane when the caller closes its stream, or is gone."""
        ...

    async def control(self, verb: Control) -> bytes:
        """Answers a control verb; the answer's type belongs to the verb. Raises DynamoError.

        The plane itself releases a ticket as refused when the caller it was sent to has not taken it, or is gone.
        """
        ...


@runtime_checkable
class PushingService(Protocol):
    """A service that can hand chunks over with no task waking for them."""

    def generate_into(self, request: GenerateRequest, push: Callable[[Chunk], None]) -> AsyncGenerator[Chunk, None]:
        """As `Service.generate`, less the chunks that were given to `push`, in their order with those yielded."""
        ...


class ServerHandle(Protocol):
    """One service at one subject."""

    async def stop_accepting(self) -> None:
        """Stop taking requests: new ones get `Unreachable` or `Draining`. Running streams and control verbs go on."""
        ...

    async def finished(self) -> None:
        """Returns when no stream runs."""
        ...

    @property
    def running(self) -> int:
        """Streams."""
        ...

    async def aclose(self) -> None:
        """Ends running streams too (callers see `Draining`). Idempotent."""
        ...


class Plane(Protocol):
    async def serve(self, subject: str, service: Service) -> ServerHandle:
        """Take requests at `subject` (and control verbs at its control subject) until closed."""
        ...

    def generate(self, subject: str, request: GenerateRequest, sink: Sink | None = None) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one call, in order and complete, or raise the worker's error as the same class.

        Raises Unreachable when no worker takes the request within the acknowledge time-out, StreamIncomplete for a gap
        or an end with no terminal chunk, Disconnected when the plane is lost, DeadlineExceeded when the request's
        deadline passes. Consume with `aclosing`: closing it sends the cancel, without awaiting.

        A chunk that comes while the stream is waited for goes to `sink` first, and is yielded only if that does not
        take it: no task wakes for it. The first chunk and the terminal one are always yielded.
        """
        ...

    async def control(self, subject: str, verb: Control, *, timeout_s: float = 5.0) -> bytes:
        """Send one control verb to the instance with this generate subject. Raises as `generate`, KvTransferError."""
        ...

    def unavailable_reason(self) -> str | None:
        """What keeps every request from being carried now, for people; None: nothing that is known."""
        ...

    async def aclose(self) -> None: ...
