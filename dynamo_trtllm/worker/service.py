"""What a worker answers on the request plane: the engine's streams and the control verbs. One catch-all lives here."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path

from dynamo_trtllm import codec
from dynamo_trtllm.engines.base import Engine, EngineStats, HasStats, HasTickets, Push, Pushes
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
from dynamo_trtllm.request_plane.base import ServerHandle
from dynamo_trtllm.worker.admission import Admission

_log = logging.getLogger(__name__)

PIECE_BYTES = 512 << 10  # well under NATS' default payload limit of 1 MiB

_PHASES = {
    Role.PREFILL: {Phase.PREFILL},
    Role.DECODE: {Phase.DECODE},
    Role.AGGREGATED: {Phase.AGGREGATED},
}


def digest(path: Path) -> str:
    """The content hash by which frontends ask for a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class WorkerService:
    """`plane.base.Service` over one engine. `files` maps sha256 to a path."""

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
        self.restart_asked = asyncio.Event()  # its owner ends the worker with a status that has it started again
        self.restart_reason = ""
        self._metrics = metrics
        metrics.watch(active=admission.active, reserved=admission.reserved_slots)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        return self._stream(request, None)

    def generate_into(self, request: GenerateRequest, push: Push) -> AsyncGenerator[Chunk, None]:
        """An engine that can't push has all of its chunks yielded."""
        return self._stream(request, push)

    async def _stream(self, request: GenerateRequest, push: Push | None) -> AsyncGenerator[Chunk, None]:
        request_id.set(request.request_id)
        code, output_tokens = "cancelled", 0

        def counted(chunk: Chunk) -> None:
            nonlocal output_tokens
            output_tokens += len(chunk.token_ids)
            assert push is not None
            push(chunk)

        try:
            self._check(request)
            with self._admission.admit(request, self._stats(request)):
                async with aclosing(self._chunks(request, None if push is None else counted)) as chunks:
                    async for chunk in chunks:
                        output_tokens += len(chunk.token_ids)
                        if chunk.finish_reason is not None:
                            code = "ok"
                        yield chunk
        except DynamoError as exc:
            code = exc.code
            raise
        except Exception as exc:
            code = InternalError.code
            _log.exception("request %s failed", request.request_id)
            raise InternalError(f"the worker failed on this request: {type(exc).__name__}") from exc
        finally:
            self._metrics.call_finished(phase=request.phase, code=code, output_tokens=output_tokens)

    def _chunks(self, request: GenerateRequest, push: Push | None) -> AsyncGenerator[Chunk, None]:
        if push is not None and isinstance(self._engine, Pushes):
            return self._engine.generate_into(request, push)
        return self._engine.generate(request)

    def _stats(self, request: GenerateRequest) -> EngineStats | None:
        """Return the engine's stats if this call leaves KV behind and the engine has stats, else None."""
        if request.phase is Phase.PREFILL and isinstance(self._engine, HasStats):
            return self._engine.stats()
        return None

    def _check(self, request: GenerateRequest) -> None:
        if request.model != self._model:
            raise ModelNotFound(f"this worker serves {self._model!r}, not {request.model!r}", field="model")
        if request.phase not in self._phases:
            raise InvalidRequest(f"a {self._role} worker does not serve {request.phase} calls", field="phase")
        if (request.phase is Phase.DECODE) != (request.ticket is not None):
            raise InvalidRequest(f"a {request.phase} call came with{'out' if request.ticket is None else ''} a ticket")

    async def control(self, verb: Control) -> bytes:
        match verb:
            case ReleaseKv(ticket_id, outcome):
                if isinstance(self._engine, HasTickets):
                    self._engine.release(ticket_id, outcome)
                return b""
            case GetFile(sha256, offset):
                return codec.encode(self._piece(sha256, offset))
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
            raise InvalidRequest(f"a {self._role} worker keeps no decode slots")
        self._admission.reserve(reservation_id, expires_at)

    def _piece(self, sha256: str, offset: int) -> FileChunk:
        path = self._files.get(sha256)
        if offset < 0:
            raise InvalidRequest(f"offset {offset} is negative", field="offset")
        if path is None:
            raise InvalidRequest(f"this worker has no file {sha256}", field="sha256")
        with path.open("rb") as file:
            file.seek(offset)
            return FileChunk(data=file.read(PIECE_BYTES), total_bytes=path.stat().st_size)


_SAY_EVERY_S = 3.0
_SOON_S = 0.1  # what is done by then is not worth a line


async def drain(engine: Engine, serving: ServerHandle, timeout_s: float) -> None:
    """Returns after `timeout_s` in any case, with a warning that tells what was left."""
    await serving.stop_accepting()
    finishing = asyncio.create_task(_finish(engine, serving), name="worker-drain")
    loop = asyncio.get_running_loop()
    begun_s, pause_s = loop.time(), _SOON_S
    try:
        while not finishing.done():
            left_s = timeout_s - (loop.time() - begun_s)
            if left_s <= 0:
                left = _left(engine, serving)
                _log.warning("requests or tickets were left after --drain-timeout-s %g: %s", timeout_s, left)
                return
            await asyncio.wait({finishing}, timeout=min(pause_s, left_s))
            if not finishing.done():
                spent_s = loop.time() - begun_s
                _log.info("draining for %.0f s of %g s, waiting for %s", spent_s, timeout_s, _left(engine, serving))
            pause_s = _SAY_EVERY_S
        finishing.result()
        _log.info("drained")
    except DynamoError as exc:
        _log.warning("the engine could not drain (%s): %s", exc.code, exc.message)
    finally:
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)


async def _finish(engine: Engine, serving: ServerHandle) -> None:
    await serving.finished()  # also those that the engine has not seen yet
    await engine.drain()


def _left(engine: Engine, serving: ServerHandle) -> str:
    requests = f"requests: {serving.running}"
    if not isinstance(engine, HasStats):
        return requests
    return f"{requests}, tickets whose KV is kept: {engine.stats().tickets_held}"
