"""Serve an engine's streams and the control verbs on the request plane, and drain the engine.

An unexpected exception of the engine is logged, here or by its stream's task, and becomes InternalError.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from dynamo_trtllm import codec
from dynamo_trtllm.engines.base import Engine, EngineStats, HasStats
from dynamo_trtllm.errors import DynamoError, InternalError, InvalidRequest, ModelNotFound
from dynamo_trtllm.messages import (
    Chunk,
    Control,
    FileChunk,
    GenerateRequest,
    GetFile,
    Instance,
    Phase,
    ReleaseKv,
    ReleaseSlot,
    ReserveSlot,
    Restart,
    Role,
)
from dynamo_trtllm.observability.logging import request_id
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.request_plane.server import EndpointServer
from dynamo_trtllm.streams import KvHolder, OnEvent, Stream, StreamEvent, StreamHandle
from dynamo_trtllm.worker.admission import Admission

_log = logging.getLogger(__name__)

FILE_CHUNK_BYTES = 512 << 10  # below NATS' default payload limit of 1 MiB

_PHASES = {
    Role.PREFILL: {Phase.PREFILL},
    Role.DECODE: {Phase.DECODE},
    Role.AGGREGATED: {Phase.AGGREGATED},
}


def digest(path: Path) -> str:
    """Return the content hash (SHA-256, hexadecimal) with which frontends request a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _ServiceStream(Stream):
    """The stream of one call: passes the engine's events on and counts tokens and the outcome."""

    __slots__ = ("_metrics", "_output_tokens", "_phase", "admission", "source")

    def __init__(self, phase: Phase, metrics: WorkerMetrics, on_event: OnEvent) -> None:
        super().__init__(on_event)
        self._phase = phase
        self._metrics = metrics
        self._output_tokens = 0
        self.admission = ExitStack()
        self.source: StreamHandle | None = None  # None: the call was rejected

    def emit(self, event: StreamEvent) -> None:
        if isinstance(event, Chunk):
            self._output_tokens += len(event.token_ids)
            if event.finish_reason is None:
                if self._on_event is not None:
                    self._on_event(event)
                return
        super().emit(event)

    def cancel(self) -> None:
        super().cancel()
        if self.source is not None:
            self.source.cancel()

    @property
    def holds_kv(self) -> bool:
        return self.source is not None and self.source.holds_kv

    def _close(self, last: StreamEvent | None) -> None:
        code = "cancelled" if last is None else last.code if isinstance(last, DynamoError) else "ok"
        self.admission.close()  # the engine may hold a cancelled call for longer: until its fetch has stopped
        self._metrics.call_finished(phase=self._phase, code=code, output_tokens=self._output_tokens)


class WorkerService:
    """A request-plane `Service` over one engine.

    Args:
        engine: a started engine.
        instance: the worker's registered instance.
        admission: limits of the worker.
        files: paths of the card's files by content hash.
        metrics: metrics of the worker.
    """

    def __init__(
        self,
        engine: Engine,
        instance: Instance,
        admission: Admission,
        *,
        files: Mapping[str, Path],
        metrics: WorkerMetrics,
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._model = instance.card.name
        self._role = instance.role
        self._phases = _PHASES[instance.role] | ({Phase.AGGREGATED} if instance.can_aggregate else set())
        self._files = files
        self.restart_asked = asyncio.Event()  # when it is set, the worker exits with a status that restarts it
        self.restart_reason = ""
        self._metrics = metrics
        metrics.watch(active=admission.active, reserved=admission.reserved_slots)

    def generate(self, request: GenerateRequest, on_event: OnEvent) -> StreamHandle:
        stream = _ServiceStream(request.phase, self._metrics, on_event)
        context = contextvars.copy_context()  # of the stream's log lines
        context.run(request_id.set, request.request_id)
        try:
            self._check(request)
            stream.admission.enter_context(self._admission.admit(request, self._stats(request)))
            stream.source = context.run(self._engine.generate, request, stream.emit)
        except DynamoError as exc:
            asyncio.get_running_loop().call_soon(stream.emit, exc)
        except Exception as exc:  # noqa: BLE001 - logged, and the caller gets InternalError
            context.run(_log.exception, "request %s failed", request.request_id)
            error = InternalError(f"the worker failed on this request: {type(exc).__name__}")
            asyncio.get_running_loop().call_soon(stream.emit, error)
        return stream

    def _stats(self, request: GenerateRequest) -> EngineStats | None:
        """Return the engine's statistics for a prefill call, else None."""
        if request.phase is Phase.PREFILL and isinstance(self._engine, HasStats):
            return self._engine.stats()
        return None

    def _check(self, request: GenerateRequest) -> None:
        if request.model != self._model:
            raise ModelNotFound(f"this worker serves {self._model!r}, not {request.model!r}", field="model")
        if request.phase not in self._phases:
            raise InvalidRequest(f"a {self._role} worker does not serve {request.phase} calls", field="phase")
        if (request.phase is Phase.DECODE) != (request.kv_params is not None):
            has = "no" if request.kv_params is None else "unexpected"
            raise InvalidRequest(f"the {request.phase} call has {has} KV transfer parameters")

    async def control(self, verb: Control) -> bytes:
        match verb:
            case ReleaseKv(transfer_id, outcome):
                if isinstance(self._engine, KvHolder):
                    self._engine.release(transfer_id, outcome)
                return b""
            case GetFile(sha256, offset):
                return codec.encode(self._file_chunk(sha256, offset))
            case ReserveSlot(reservation_id, expires_at):
                self._reserve(reservation_id, expires_at)
                return b""
            case ReleaseSlot(reservation_id):
                self._admission.unreserve(reservation_id)
                return b""
            case Restart(reason):
                self.restart_reason = reason
                self.restart_asked.set()
                return b""

    def _reserve(self, reservation_id: str, expires_at: float) -> None:
        if self._role is not Role.DECODE:
            raise InvalidRequest(f"a {self._role} worker has no decode slots to reserve")
        self._admission.reserve(reservation_id, expires_at)

    def _file_chunk(self, sha256: str, offset: int) -> FileChunk:
        path = self._files.get(sha256)
        if offset < 0:
            raise InvalidRequest(f"offset {offset} is negative", field="offset")
        if path is None:
            raise InvalidRequest(f"this worker has no file {sha256}", field="sha256")
        with path.open("rb") as file:
            file.seek(offset)
            return FileChunk(data=file.read(FILE_CHUNK_BYTES), total_bytes=path.stat().st_size)


_LOG_EVERY_S = 3.0
_SOON_S = 0.1  # a shorter drain logs no progress


async def drain(engine: Engine, serving: EndpointServer, timeout_s: float) -> None:
    """Wait until running requests and pending KV transfers have ended, or until `timeout_s` with a warning.

    Args:
        engine: the engine to drain.
        serving: the server of its requests; it rejects new ones from now on.
        timeout_s: longest wait in seconds.
    """
    serving.stop_accepting()
    finishing = asyncio.create_task(_finish(engine, serving), name="worker-drain")
    loop = asyncio.get_running_loop()
    begun_s, pause_s = loop.time(), _SOON_S
    try:
        while not finishing.done():
            left_s = timeout_s - (loop.time() - begun_s)
            if left_s <= 0:
                text = "drain timed out after %g s (%s); raise --drain-timeout-s to wait longer"
                _log.warning(text, timeout_s, _left(engine, serving))
                return
            await asyncio.wait({finishing}, timeout=min(pause_s, left_s))
            if not finishing.done():
                spent_s = loop.time() - begun_s
                text = "draining for %.0f s (up to %g s): %s"
                _log.info(text, spent_s, timeout_s, _left(engine, serving))
            pause_s = _LOG_EVERY_S
        finishing.result()
        _log.info("drained")
    except DynamoError as exc:
        _log.warning("drain failed (%s): %s", exc.code, exc.message)
    finally:
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)


async def _finish(engine: Engine, serving: EndpointServer) -> None:
    await serving.finished()  # includes requests that have not reached the engine yet
    await engine.drain()


def _left(engine: Engine, serving: EndpointServer) -> str:
    requests = f"running requests: {serving.running}"
    if not isinstance(engine, HasStats):
        return requests
    return f"{requests}, pending KV transfers: {engine.stats().tickets_held}"
