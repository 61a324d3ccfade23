"""Serve requests with a loaded AsyncLLM: calls, KV transfers, deadlines and errors, on the event loop.

The engine passes in the AsyncLLM and the limits; this module loads nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from dynamo_trtllm.engines.base import EngineStats
from dynamo_trtllm.engines.external.engine import Counts, EngineOutput, Times, chunk_of, engine_stats, transfer_chunk
from dynamo_trtllm.engines.external.pending_transfers import TransferIdentity
from dynamo_trtllm.engines.vllm.bindings import VENDOR_ERRORS, VllmBindings
from dynamo_trtllm.engines.vllm.inflight import VllmInflightRequest, VllmOutputCursor
from dynamo_trtllm.engines.vllm.requests import VllmCall, VllmModelLimits, build_call
from dynamo_trtllm.engines.vllm.transfers import KvReleaser, VllmTransfers
from dynamo_trtllm.errors import (
    DeadlineExceeded,
    DynamoError,
    EngineFailed,
    MigrationFailed,
    RequestRejected,
    TransferFailed,
)
from dynamo_trtllm.kv_transfer.params import FetchLimits, first_deadline, timeout_error
from dynamo_trtllm.messages import Chunk, GenerateRequest, Phase, PhaseTimings, ReleaseOutcome

_log = logging.getLogger(__name__)

# Methods of the worker extension.
_RELEASE = "dynamo_release_kv"
_BIND_LIFETIME = "dynamo_bind_lifetime"
_RELEASE_S = 10.0
_ABORT_S = 5.0


class VllmSession:
    """The use of one AsyncLLM. The engine shuts the AsyncLLM down."""

    def __init__(
        self, bindings: VllmBindings, llm: Any, model_limits: VllmModelLimits, identity: TransferIdentity, times: Times
    ) -> None:
        self._bindings = bindings
        self._llm = llm
        self._model_limits = model_limits
        self._times = times
        self._transfers = VllmTransfers(identity, bindings.version, ttl_s=times.ticket_ttl_s, on_change=self._note_idle)
        self._kv_releaser = KvReleaser(self._release_kv)
        self._failed: EngineFailed | None = None
        self._inflight: set[VllmInflightRequest] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()

    async def bind_lifetime(self) -> None:
        """Make vLLM's processes end with this one, even if this one is killed.

        Raises:
            EngineFailed: They do not respond.
        """
        try:
            is_bound = await self._llm.collective_rpc(_BIND_LIFETIME, timeout=_RELEASE_S, args=(os.getpid(),))
        except Exception as exc:  # vLLM raises a bare Exception for errors in its workers
            raise self.fail(f"vLLM's workers do not respond: {exc}") from exc
        if not all(is_bound):
            _log.warning("no pidfd_open on this system: if this process is killed, end vLLM's processes by hand")

    def check(self) -> None:
        """Check that vLLM's engine process is alive. If it has died, end every stream.

        Raises:
            EngineFailed: It has died, or the session was closed.
        """
        if self._failed is None and self._llm.errored:
            raise self.fail("vLLM's engine process has died; see its log")
        if self._failed is not None:
            raise EngineFailed(self._failed.message)

    def fail(self, why: str) -> EngineFailed:
        """End every stream with the reason, including those that wait for an output. Return the error."""
        if self._failed is None:
            failed = self._failed = EngineFailed(why)
            for inflight in list(self._inflight):
                inflight.abort(lambda: EngineFailed(failed.message))
            self._transfers.close()  # the KV is gone with the engine
        return EngineFailed(self._failed.message)

    async def drain(self) -> None:
        await self._idle.wait()

    async def aclose(self) -> None:
        """End every stream. Repeated calls are allowed."""
        self.fail("the engine was closed")
        await self._kv_releaser.aclose()
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_S)
        self._bindings.suppress_shutdown_log(self._llm)

    # --- requests --------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Run a request, see `EngineSession.generate`. Closing the stream early aborts the call."""
        self.check()
        fetched_kv = self._transfers.import_kv(request) if request.phase is Phase.DECODE else None
        call = build_call(request, self._model_limits, fetched_kv)
        inflight = self._submit(request)
        cursor = VllmOutputCursor(
            alternatives=request.sampling.logprobs,
            first=call.first,
            first_logprobs=() if request.kv_params is None else request.kv_params.first_logprobs,
        )
        is_exported = False
        try:
            async with aclosing(self._outputs(call, inflight)) as outputs:
                async for output in outputs:
                    step = cursor.read(output.outputs[0])
                    self._note_started(request, inflight)
                    if call.exports_kv and step.finish == "length":
                        chunk = self._export_kv(request, call, inflight, output, step)
                        is_exported = True
                    elif step.finish is None and not step.token_ids:
                        continue
                    else:
                        chunk = self._chunk(request, inflight, output, step)
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            raise self._unfinished(request, inflight)
        finally:
            if call.exports_kv and not is_exported and self._failed is None:
                self._kv_releaser.post(inflight.call_id)
            self._finish(inflight)

    def _submit(self, request: GenerateRequest) -> VllmInflightRequest:
        inflight = VllmInflightRequest(request, f"{request.request_id}.{next(self._numbers)}", self._abort)
        kv_params = request.kv_params
        if request.phase is Phase.DECODE and kv_params is not None:  # vLLM does not report when the KV transfer starts
            limit = first_deadline(kv_params, FetchLimits(request.deadline, self._times.handoff_timeout_s), time.time())
            inflight.due_in(limit.left_s, lambda: timeout_error(kv_params, limit))
        else:
            self._due_at_deadline(request, inflight)
        self._inflight.add(inflight)
        self._note_idle()
        return inflight

    def _due_at_deadline(self, request: GenerateRequest, inflight: VllmInflightRequest) -> None:
        inflight.due_in(
            request.deadline - time.time(),
            lambda: DeadlineExceeded(f"the deadline passed after {inflight.age_s():.1f} s in the engine"),
        )

    def _note_started(self, request: GenerateRequest, inflight: VllmInflightRequest) -> None:
        if inflight.started or inflight.reason is not None:
            return
        inflight.start()
        if request.phase is Phase.DECODE:
            self._due_at_deadline(request, inflight)

    async def _outputs(self, call: VllmCall, inflight: VllmInflightRequest) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs and translate its errors. Ends early if the call was aborted."""
        stream = self._llm.generate(**self._bindings.arguments(call), request_id=inflight.call_id)
        try:
            while True:
                try:
                    output = await anext(stream)
                except StopAsyncIteration:
                    return
                except (self._bindings.dead, self._bindings.broken, *VENDOR_ERRORS) as exc:
                    raise self._translated(inflight, exc) from exc
                inflight.finished = inflight.finished or bool(output.finished)
                if inflight.reason is not None:
                    return
                yield output
        finally:
            await self._close(stream, inflight)

    async def _close(self, stream: AsyncGenerator[Any, None], inflight: VllmInflightRequest) -> None:
        """Close vLLM's stream, which aborts a running call. A dead engine also fails the other streams."""
        try:
            await stream.aclose()
        except (self._bindings.dead, self._bindings.broken, *VENDOR_ERRORS) as exc:
            _log.debug("end of %s: %s", inflight.call_id, self._translated(inflight, exc).message)

    def _translated(self, inflight: VllmInflightRequest, exc: Exception) -> DynamoError:
        if isinstance(exc, self._bindings.dead):
            return self.fail(f"vLLM's engine has died: {exc}")
        return self._broken(inflight, exc.__cause__ or exc if isinstance(exc, self._bindings.broken) else exc)

    def _broken(self, inflight: VllmInflightRequest, exc: BaseException) -> DynamoError:
        """Return the error of a failed call: that of the request, or EngineFailed if the engine has failed."""
        if self._failed is not None:
            return EngineFailed(self._failed.message)
        if self._llm.errored:
            return self.fail(f"vLLM's engine has died: {exc}")
        if not inflight.started and isinstance(exc, (ValueError, TypeError, AssertionError, LookupError)):
            return RequestRejected(f"vLLM rejected the request: {exc}")
        return MigrationFailed(f"vLLM ended request {inflight.call_id} with {type(exc).__name__}: {exc}")

    def _unfinished(self, request: GenerateRequest, inflight: VllmInflightRequest) -> DynamoError:
        if inflight.reason is not None:
            return inflight.reason()
        return MigrationFailed(f"vLLM ended request {request.request_id} without a reason; see its log")

    def _export_kv(
        self, request: GenerateRequest, call: VllmCall, inflight: VllmInflightRequest, output: Any, step: EngineOutput
    ) -> Chunk:
        """Return the terminal chunk of a prefill call."""
        expires_at = time.monotonic() + self._times.ticket_ttl_s
        kv_params = self._transfers.export_kv(
            request,
            output.kv_transfer_params,
            step,
            seed=call.seed,
            abort=lambda: self._drop_kv(inflight.call_id, expires_at),
        )
        return transfer_chunk(kv_params, _stats(inflight, output))

    def _drop_kv(self, call_id: str, expires_at: float) -> None:
        if time.monotonic() < expires_at:
            self._kv_releaser.post(call_id)
        else:  # a decode engine whose clock is behind may still read the KV
            self._kv_releaser.post_later(call_id)

    def _chunk(self, request: GenerateRequest, inflight: VllmInflightRequest, output: Any, step: EngineOutput) -> Chunk:
        """Return the chunk of an output.

        Raises:
            TransferFailed: The KV could not be read.
            MigrationFailed: vLLM ended the request with an error.
        """
        if step.is_broken:
            if request.phase is Phase.DECODE and step.finish == "error":
                raise TransferFailed("vLLM could not read the prompt's KV; see NixlConnector's lines in its log")
            raise MigrationFailed(f"vLLM ended request {request.request_id} with {step.finish!r}")
        return chunk_of(step, _stats(inflight, output))

    def _abort(self, call_id: str) -> None:
        """Start to abort a call. Its stream ends when vLLM has aborted it."""
        task = asyncio.get_running_loop().create_task(self._abort_call(call_id), name=f"abort-{call_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_call(self, call_id: str) -> None:
        try:
            await self._llm.abort(call_id)
        except (self._bindings.dead, *VENDOR_ERRORS) as exc:
            _log.debug("abort of %s: %s", call_id, exc)

    async def _release_kv(self, call_ids: list[str]) -> Iterable[Iterable[str]]:
        released: Iterable[Iterable[str]] = await self._llm.collective_rpc(
            _RELEASE, timeout=_RELEASE_S, args=(call_ids,)
        )
        return released

    def _finish(self, inflight: VllmInflightRequest) -> None:
        self._inflight.discard(inflight)
        inflight.close()
        self._note_idle()

    def _note_idle(self) -> None:
        if self._inflight or len(self._transfers):
            self._idle.clear()
        else:
            self._idle.set()

    # --- KV transfers and statistics -------------------------------------------------------------------

    def release(self, transfer_id: str, outcome: ReleaseOutcome) -> None:
        """End a KV transfer.

        If the KV was fetched, this updates only the bookkeeping: the decode engine's connector notifies this engine's
        connector, which frees the KV.
        """
        self._transfers.release(transfer_id, outcome)

    def is_pending(self, transfer_id: str) -> bool:
        """See `KvHolder.is_pending`."""
        return self._transfers.is_pending(transfer_id)

    def stats(self, counts: Counts) -> EngineStats:
        """Return the statistics. `counts`: of the engine's last step."""
        return engine_stats(counts, len(self._inflight), self._transfers)


def _stats(inflight: VllmInflightRequest, output: Any) -> PhaseTimings:
    return inflight.stats(cached_tokens=int(output.num_cached_tokens or 0))
