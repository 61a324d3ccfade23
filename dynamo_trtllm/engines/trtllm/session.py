"""Run requests with a built LLM on the event loop: calls, KV transfers, deadlines, errors and statistics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from dynamo_trtllm.engines.base import EngineStats
from dynamo_trtllm.engines.external.engine import EngineOutput, Times, chunk_of, engine_stats, transfer_chunk
from dynamo_trtllm.engines.external.pending_transfers import TransferIdentity, transfer_params_of
from dynamo_trtllm.engines.trtllm import transfers as wire
from dynamo_trtllm.engines.trtllm.bindings import TrtllmBindings
from dynamo_trtllm.engines.trtllm.inflight import (
    KV_PENDING,
    VENDOR_ERRORS,
    StatsPoller,
    TrtllmInflightRequest,
    TrtllmOutputCursor,
    VendorError,
)
from dynamo_trtllm.engines.trtllm.requests import TrtllmCall, TrtllmModelLimits, build_call
from dynamo_trtllm.engines.trtllm.transfers import TrtllmTransfers
from dynamo_trtllm.errors import (
    DeadlineExceeded,
    DynamoError,
    EngineFailed,
    MigrationFailed,
    RequestRejected,
    TransferFailed,
    TransferTimeout,
)
from dynamo_trtllm.kv_transfer.params import FetchLimits, first_deadline, timeout_error
from dynamo_trtllm.messages import Chunk, GenerateRequest, Phase, PhaseTimings, ReleaseOutcome

_log = logging.getLogger(__name__)

_STALL_S = 300.0  # without a result or an iteration for this time, the executor counts as stalled


class TrtllmSession:
    """Runs the requests of one LLM, which the engine shuts down."""

    def __init__(
        self,
        bindings: TrtllmBindings,
        llm: Any,
        model_limits: TrtllmModelLimits,
        identity: TransferIdentity,
        times: Times,
    ) -> None:
        self._bindings = bindings
        self._llm = llm
        self._model_limits = model_limits
        self._times = times
        self._transfers = TrtllmTransfers(
            identity, bindings.capabilities, ttl_s=times.ticket_ttl_s, on_change=self._note_idle
        )
        self._stats_poller = StatsPoller(llm.get_stats)
        self._stall_s = max(_STALL_S, 2 * times.ticket_ttl_s)
        self._failed: EngineFailed | None = None
        self._inflight: set[TrtllmInflightRequest] = set()  # includes aborted calls until they are drained
        self._drain_tasks: set[asyncio.Task[None]] = set()
        self._last_result_at = time.monotonic()
        self._idle = asyncio.Event()
        self._idle.set()

    def poll_stats(self) -> None:
        """Start polling statistics. Some releases have none before their first request."""
        self._stats_poller.start()

    def check(self) -> None:
        """Raise EngineFailed, and end all streams, if the executor is shut down or stalled."""
        if self._failed is not None:
            raise EngineFailed(self._failed.message)
        if not self._healthy():
            raise self.fail("TensorRT-LLM's executor shut down after an error; see the worker's log")
        waiting = [inflight.created_at for inflight in self._inflight if not inflight.is_draining]
        if self._stats_poller.is_polling and waiting:
            still_s = time.monotonic() - max(self._last_result_at, self._stats_poller.changed_at, min(waiting))
            if still_s > self._stall_s:
                raise self.fail(
                    f"TensorRT-LLM is stalled: no iteration for {still_s:.0f} s, requests waiting: {len(waiting)}"
                )

    def _healthy(self) -> bool:
        try:
            return self._bindings.healthy(self._llm)
        except VENDOR_ERRORS:
            return False

    def fail(self, why: str) -> EngineFailed:
        """End all streams with an error and return it. The first reason is reported for later requests too."""
        if self._failed is None:
            self._failed = EngineFailed(why)
            for inflight in self._inflight:
                inflight.interrupt()
            self._transfers.close()  # their KV ended with the executor
        return EngineFailed(self._failed.message)

    async def drain(self) -> None:
        """See `Engine.drain`."""
        await self._idle.wait()

    async def aclose(self) -> None:
        """End all streams and background tasks. Idempotent."""
        self.fail("the engine is closed")
        for task in self._drain_tasks:
            task.cancel()
        await asyncio.gather(*self._drain_tasks, return_exceptions=True)
        await asyncio.to_thread(self._stats_poller.stop)

    # --- requests --------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """See `EngineSession.generate`. After an early close, a background task aborts the call and drains it."""
        call = build_call(request, self._model_limits)
        disagg = self._disagg(request, call)
        inflight = self._submit(request, call, disagg)
        try:
            if call.exports_kv:
                yield await self._context_only(request, call, inflight)
                return
            while True:
                step = await self._step(request, inflight)
                if step.finish is None and not step.token_ids:
                    continue
                chunk = self._chunk(request, inflight, step)
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            self._finish(inflight)

    def _disagg(self, request: GenerateRequest, call: TrtllmCall) -> dict[str, Any] | None:
        if call.exports_kv:
            return self._transfers.context_params()
        if request.phase is Phase.DECODE:
            kv_params = transfer_params_of(request)
            if call.max_tokens <= len(kv_params.first_token_ids):
                raise RequestRejected(
                    f"KV transfer {kv_params.transfer_id} already has all requested tokens; nothing is left to decode"
                )
            return self._transfers.import_kv(request, self._bindings.logprob)
        return None

    def _submit(
        self, request: GenerateRequest, call: TrtllmCall, disagg: dict[str, Any] | None
    ) -> TrtllmInflightRequest:
        first = transfer_params_of(request).first_logprobs if request.phase is Phase.DECODE else ()
        cursor = TrtllmOutputCursor(
            stop_ids=call.stop_ids,
            end_id=call.sampling["end_id"],
            logprobs=request.sampling.logprobs,
            first=first,
        )
        arguments = self._bindings.arguments(call, disagg, vocab_size=self._model_limits.vocab_size)
        try:
            result = self._llm.generate_async(**arguments)
        except (self._bindings.request_error, *VENDOR_ERRORS) as exc:
            raise self._to_error(exc) from exc
        inflight = TrtllmInflightRequest(request, call, result, cursor)
        if request.kv_params is None:
            inflight.due_in(request.deadline - time.time())
        else:  # TensorRT-LLM does not separate queue time from transfer time
            inflight.bound = first_deadline(
                request.kv_params, FetchLimits(request.deadline, self._times.handoff_timeout_s), time.time()
            )
            inflight.due_in(inflight.bound.left_s)
        self._inflight.add(inflight)
        self._note_idle()
        return inflight

    async def _context_only(self, request: GenerateRequest, call: TrtllmCall, inflight: TrtllmInflightRequest) -> Chunk:
        """Return the terminal chunk of a prefill call. If the first token ends the output, the KV is freed."""
        step = await self._step(request, inflight)
        if step.finish not in KV_PENDING:
            return self._chunk(request, inflight, step)
        if step.token_ids and step.token_ids[-1] in call.stop_ids:
            inflight.abort()  # otherwise the KV would wait for a decode worker
            return self._chunk(
                request, inflight, EngineOutput(token_ids=step.token_ids, logprobs=step.logprobs, finish="stop")
            )
        try:
            params = self._transferred(inflight)
            kv_params = self._transfers.export_kv(request, params, step.logprobs, inflight.abort)
        except DynamoError:
            inflight.abort()
            raise
        return transfer_chunk(kv_params, self._stats_of(inflight))

    def _transferred(self, inflight: TrtllmInflightRequest) -> dict[str, Any]:
        params = inflight.result.outputs[0].disaggregated_params
        if params is None:
            raise RequestRejected(
                "TensorRT-LLM returned no disaggregated_params for a context-only call; "
                "set cache_transceiver_config.backend",
                field="cache_transceiver_config.backend",
            )
        return {
            name: getattr(params, name) for name in wire.transferred_fields(self._bindings.capabilities.disagg_fields)
        }

    async def _step(self, request: GenerateRequest, inflight: TrtllmInflightRequest) -> EngineOutput:
        """Wait for the next result. Raises the error that ends the request, also when its deadline passes."""
        if self._failed is not None:
            raise EngineFailed(self._failed.message)
        fetching = inflight.fetches_kv and not inflight.started
        try:
            step = await inflight.step()
        except TimeoutError as exc:
            raise self._timeout_error(request, inflight) from exc
        except VendorError as exc:
            raise self._to_error(exc.raised, inflight) from exc.raised
        self._last_result_at = time.monotonic()
        if fetching:
            inflight.due_in(request.deadline - time.time())
        return step

    def _timeout_error(self, request: GenerateRequest, inflight: TrtllmInflightRequest) -> DynamoError:
        if self._failed is not None:
            return EngineFailed(self._failed.message)
        if inflight.bound is not None and not inflight.started:
            return timeout_error(transfer_params_of(request), inflight.bound)
        return DeadlineExceeded(f"the deadline of the request passed after {inflight.age_s():.1f} s in the engine")

    def _to_error(self, exc: Exception, inflight: TrtllmInflightRequest | None = None) -> DynamoError:
        """Convert an exception of TensorRT-LLM; one that does not belong to a single request ends the engine."""
        if not self._healthy():
            return self.fail(f"TensorRT-LLM's executor shut down: {exc}")
        if isinstance(exc, (self._bindings.request_error, ValueError, TypeError, AssertionError)):
            if inflight is not None and inflight.fetches_kv and not inflight.started:
                return TransferFailed(f"TensorRT-LLM failed to receive the KV of the prompt: {exc}")
            return RequestRejected(f"TensorRT-LLM rejected the request: {exc}")
        return self.fail(f"TensorRT-LLM failed: {type(exc).__name__}: {exc}")

    def _chunk(self, request: GenerateRequest, inflight: TrtllmInflightRequest, step: EngineOutput) -> Chunk:
        """Convert an output. Raises the error of a request that TensorRT-LLM did not complete."""
        if step.is_broken:
            raise _broken(request, inflight, step)
        return chunk_of(step, self._stats_of(inflight))

    def _stats_of(self, inflight: TrtllmInflightRequest) -> PhaseTimings:
        is_reported = self._bindings.capabilities.cached_tokens
        return inflight.stats(cached_tokens=int(inflight.result.cached_tokens or 0) if is_reported else 0)

    def _finish(self, inflight: TrtllmInflightRequest) -> None:
        """Remove an ended request. If its call is still running, a background task aborts and drains it."""
        if inflight.finished or self._failed is not None:
            self._forget(inflight)
            return
        inflight.is_draining = True
        task = asyncio.get_running_loop().create_task(inflight.abort_and_drain(), name=f"drain-{inflight.request_id}")
        self._drain_tasks.add(task)
        task.add_done_callback(self._drain_tasks.discard)
        task.add_done_callback(lambda _: self._forget(inflight))

    def _forget(self, inflight: TrtllmInflightRequest) -> None:
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
        """See `KvHolder.release`. After a fetch TensorRT-LLM itself frees the KV, without reporting it."""
        self._transfers.release(transfer_id, outcome)

    def is_pending(self, transfer_id: str) -> bool:
        """See `KvHolder.is_pending`."""
        return self._transfers.is_pending(transfer_id)

    def stats(self) -> EngineStats:
        """See `HasStats`. An idle engine has no iterations, so the used KV blocks of the last one are ignored."""
        counts, calls = self._stats_poller.counts, len(self._inflight)
        if not calls and not len(self._transfers):
            counts = counts._replace(kv_blocks_used=0)
        return engine_stats(counts, calls, self._transfers)


def _broken(request: GenerateRequest, inflight: TrtllmInflightRequest, step: EngineOutput) -> DynamoError:
    """Return the error for a request that TensorRT-LLM ended on its own."""
    if inflight.fetches_kv and not inflight.had_tokens:
        error = TransferTimeout if step.finish == "timeout" else TransferFailed
        return error(f"TensorRT-LLM stopped receiving the KV of the prompt ({step.finish})")
    if step.finish == "timeout":
        return DeadlineExceeded("the request timed out in TensorRT-LLM")
    return MigrationFailed(f"TensorRT-LLM ended request {request.request_id} with {step.finish!r}")
