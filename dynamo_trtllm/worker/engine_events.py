"""Check what an engine of another package sends for a call, before it leaves the worker.

A frontend can't read a chunk with a value of a wrong type. It would blame the connection and
quarantine the worker, and nothing would tell the author of the engine what is wrong.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import Callable
from typing import Any

from dynamo_trtllm.protocol.errors import BadFrame, DynamoError, InternalError
from dynamo_trtllm.protocol.messages import Chunk, decode, encode
from dynamo_trtllm.protocol.streams import OnEvent, StreamHandle

log = logging.getLogger(__name__)

_OWN_PACKAGE = __name__.partition(".")[0]


def is_foreign(engine: object) -> bool:
    """Return whether the class of an engine belongs to another package."""
    return type(engine).__module__.partition(".")[0] != _OWN_PACKAGE


class EngineEvents:
    """Receives the events of one call from an engine, and passes them on if they are valid.

    A wrong event ends the call with InternalError, and the log says what is wrong with it.

    Args:
        engine: name of the engine's class, for the log.
        request_id: id of the call, for the log.
        emit: receives the valid events.
    """

    __slots__ = ("_emit", "_engine", "_handle", "_has_failed", "_loop", "_request_id", "_thread_id")

    def __init__(self, engine: str, request_id: str, emit: OnEvent) -> None:
        self._engine = engine
        self._request_id = request_id
        self._emit = emit
        self._handle: StreamHandle | None = None  # None: `generate` has not returned
        self._has_failed = False
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()

    def start(self, generate: Callable[[OnEvent], Any]) -> StreamHandle:
        """Start the call, and return its handle.

        Raises:
            TypeError: `generate` has returned something else.
        """
        handle: Any = generate(self._receive)
        if not callable(getattr(handle, "cancel", None)):
            raise TypeError(
                f"{self._engine}.generate returned a value of type {type(handle).__name__}; it must"
                " return a StreamHandle"
            )
        self._handle = handle
        return handle  # type: ignore[no-any-return]

    def _receive(self, event: Any) -> None:
        if self._has_failed:
            return
        if threading.get_ident() != self._thread_id:
            problem = "sent an event from another thread; call loop.call_soon_threadsafe"
        elif self._handle is None:
            problem = "sent an event before `generate` returned; send it later, as TaskStream does"
        else:
            problem = problem_of(event)
        if not problem:
            self._emit(event)
            return
        self._has_failed = True
        log.error("request %s failed: %s %s", self._request_id, self._engine, problem)
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """Cancel the call in the engine, and end it for its caller."""
        if self._handle is not None:
            self._handle.cancel()
        self._emit(
            InternalError("the engine sent a wrong event for this request; see the worker's log")
        )


def problem_of(event: object) -> str:
    """Return what is wrong with an event of an engine; "" if nothing is."""
    if isinstance(event, DynamoError):
        return ""
    if not isinstance(event, Chunk):
        return f"sent a value of type {type(event).__name__}; send a Chunk or a DynamoError"
    ids: object = event.token_ids
    if not isinstance(ids, array) or ids.typecode != "I":
        kind = f"array({ids.typecode!r})" if isinstance(ids, array) else type(ids).__name__
        return f"sent a Chunk whose token_ids have the type {kind}; pack them with token_ids()"
    if event.is_plain and not event.logprobs:
        return ""  # most chunks
    try:
        decode(encode(event), Chunk)
    except (BadFrame, TypeError, ValueError, OverflowError, RecursionError) as exc:
        return f"sent a Chunk with a value of a wrong type: {exc}"
    return ""
