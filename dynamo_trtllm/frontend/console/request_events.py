"""Collect the events of one request from all running processes, for the console."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dynamo_trtllm.cluster.request_plane.plane import RequestPlane
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.observability.recording_queries import RecordingQueries
from dynamo_trtllm.observability.recording_server import (
    RecordingQuery,
    Selection,
    timelines_prefix,
)
from dynamo_trtllm.observability.recordings import Recordings, RequestIds
from dynamo_trtllm.observability.request_timeline import outcome, timeline_notes, timeline_rows
from dynamo_trtllm.protocol.errors import InvalidRequest, Overloaded

_TIMEOUT_S: Final = 2.0  # longest wait for the answers of all processes
# Shortest wait for the answers. Frontends are not registered, so it is not known when all have
# answered.
_SETTLE_S: Final = 0.3
_MAX_WAITING: Final = 8  # each answer takes up to 300 ms of CPU time in each process
_MAX_ID_CHARS: Final = 256


class RequestHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The life of one request, as `explain` shows it."""

    id: str
    outcome: str
    rows: list[tuple[float, str, str]]  # ms since the first event, process, event
    notes: list[str]


@dataclass(eq=False)
class _PlaneTransport:
    """Carries queries of a frontend. The answers come to a subject that only frontends read."""

    _plane: RequestPlane
    _namespace: str

    def new_inbox(self) -> str:
        return f"{timelines_prefix(self._namespace)}{secrets.token_hex(8)}"

    async def subscribe(
        self, subject: str, receive: Callable[[bytes, str], None]
    ) -> Callable[[], Awaitable[None]]:
        return await self._plane.subscribe(subject, receive)

    def publish(self, subject: str, data: bytes) -> None:
        self._plane.try_publish(subject, data)


@dataclass(eq=False)
class RequestEventReader:
    """Asks all processes for the events of a request, one request at a time.

    Args:
        plane: reaches the processes.
        models: knows the workers that have to answer.
        namespace: the namespace of the processes.
    """

    _plane: RequestPlane
    _models: ModelRegistry
    _namespace: str
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _num_waiting: int = field(default=0, init=False)

    async def read(self, request_id: str) -> RequestHistory:
        """Return the events of a request.

        Args:
            request_id: any id that `explain` takes, except one that the client has chosen.

        Raises:
            InvalidRequest: the id is too long.
            Overloaded: too many timelines are being read.
        """
        if len(request_id) > _MAX_ID_CHARS:
            raise InvalidRequest(f"an id of a request has at most {_MAX_ID_CHARS} characters")
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} timelines are being read, the limit; try again")
        self._num_waiting += 1
        try:
            async with self._asking:
                recordings = await self._ask(request_id)
        finally:
            self._num_waiting -= 1
        found = recordings.find(request_id)
        if not found:
            note = (
                "No running process has recorded this request: it is too old, its processes have"
                " ended, or --recorder-dir is off."
            )
            return RequestHistory(id=request_id, outcome="not found", rows=[], notes=[note])
        request = found[0]
        notes = timeline_notes(request)
        notes += [f"{holder.title}: {holder.reason}" for holder in recordings.unanswered.values()]
        return RequestHistory(
            id=request.id,
            outcome=outcome(request),
            rows=[(row.since_ms, row.process, row.event) for row in timeline_rows(request)],
            notes=notes,
        )

    async def _ask(self, request_id: str) -> Recordings:
        """Return what the processes have recorded of a request."""
        instances = {instance.id: instance for instance in self._models.instances()}
        transport = _PlaneTransport(self._plane, self._namespace)
        queries = RecordingQueries(
            transport, self._namespace, instances, _TIMEOUT_S, settle_s=_SETTLE_S
        )
        keys = RequestIds.parse(request_id).keys
        query = RecordingQuery(inbox="", selection=Selection.GIVEN, keys=sorted(keys))
        await queries.ask(query)  # chooses the inbox
        await queries.read_clocks()
        return queries.result(Recordings([]))
