"""Serve requests with a built LLM: its calls, tickets, deadlines and errors, on the event loop.

Loads nothing and checks no configuration: the engine passes in what was built and the limits that apply.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from dynamo_trtllm.engines.base import EngineStats
from dynamo_trtllm.engines.external import EngineOutput, Times, chunk_of, engine_stats, transfer_chunk
from dynamo_trtllm.engines.pending_transfers import TransferIdentity, ticket_of
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

_STALL_S = 300.0  # no result and no iteration for so long, with requests under way: the executor stands still


class TrtllmSession:
    """One per built LLM, which stays the engine's to shut down."""

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
        self._inflight: set[TrtllmInflightRequest] = (
            set()
        )  # until the vendor has answered, or its time to answer is over
        self._drain_tasks: set[asyncio.Task[None]] = set()
        self._last_result_at = time.monotonic()
        self._idle = asyncio.Event()
        self._idle.set()

    def poll_stats(self) -> None:
        """From now on. Some releases have no statistics to wait for before their first request."""
        self._stats_poller.start()

    def check(self) -> None:
        """Raises EngineFailed for an executor that is shut down or stands still, and tells every stream."""
        if self._failed is not None:
            raise EngineFailed(self._failed.message)
        if not self._healthy():
            raise self.fail("TensorRT-LLM's executor has shut down after an error; see its log")
        waiting = [inflight.created_at for inflight in self._inflight if not inflight.is_draining]
        if self._stats_poller.is_polling and waiting:
            still_s = time.monotonic() - max(self._last_result_at, self._stats_poller.changed_at, min(waiting))
            if still_s > self._stall_s:
                raise self.fail(f"no iteration and no result for {still_s:.0f} s with {len(waiting)} requests waiting")

    def _healthy(self) -> bool:
        try:
            return self._bindings.healthy(self._llm)
        except VENDOR_ERRORS:
            return False

    def fail(self, why: str) -> EngineFailed:
        """Every stream ends with the reason, also one that waits for a result which will never come."""
        if self._failed is None:
            self._failed = EngineFailed(why)
            for inflight in self._inflight:
                inflight.interrupt()
            self._transfers.close()  # the KV is gone with the executor
        return EngineFailed(self._failed.message)

    async def drain(self) -> None:
        await self._idle.wait()

    async def aclose(self) -> None:
        """Ends every stream and every wait. Idempotent."""
        self.fail("the engine was closed")
        for task in self._drain_tasks:
            task.cancel()
        await asyncio.gather(*self._drain_tasks, return_exceptions=True)
        await asyncio.to_thread(self._stats_poller.stop)

    # --- requests --------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. Closed early, the call is aborted and read to its end in the background."""
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
            ticket = ticket_of(request)
            if call.max_tokens <= len(ticket.first_token_ids):
                raise RequestRejected(
                    f"ticket {ticket.ticket_id} holds all tokens asked for; nothing is left to decode"
                )
            return self._transfers.import_kv(request, self._bindings.logprob)
        return None

    def _submit(
        self, request: GenerateRequest, call: TrtllmCall, disagg: dict[str, Any] | None
    ) -> TrtllmInflightRequest:
        first = ticket_of(request).first_logprobs if request.phase is Phase.DECODE else ()
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
            raise self._translated(exc) from exc
        inflight = TrtllmInflightRequest(request, call, result, cursor)
        if request.ticket is None:
            inflight.due_in(request.deadline - time.time())
        else:  # the vendor does not tell its queue from the move
            inflight.bound = first_deadline(
                request.ticket, FetchLimits(request.deadline, self._times.handoff_timeout_s), time.time()
            )
            inflight.due_in(inflight.bound.left_s)
        self._inflight.add(inflight)
        self._note_idle()
        return inflight

    async def _context_only(self, request: GenerateRequest, call: TrtllmCall, inflight: TrtllmInflightRequest) -> Chunk:
        """Return the terminal chunk of a prefill call. A first token that ends the answer leaves no KV behind."""
        step = await self._step(request, inflight)
        if step.finish not in KV_PENDING:
            return self._chunk(request, inflight, step)
        if step.token_ids and step.token_ids[-1] in call.stop_ids:
            inflight.abort()  # the vendor thinks that a decode worker will come
            return self._chunk(
                request, inflight, EngineOutput(token_ids=step.token_ids, logprobs=step.logprobs, finish="stop")
            )
        try:
            params = self._transferred(inflight)
            ticket = self._transfers.export_kv(request, params, step.logprobs, inflight.abort)
        except DynamoError:
            inflight.abort()
            raise
        return transfer_chunk(ticket, self._stats_of(inflight))

    def _transferred(self, inflight: TrtllmInflightRequest) -> dict[str, Any]:
        params = inflight.result.outputs[0].disaggregated_params
        if params is None:
            raise RequestRejected(
                "TensorRT-LLM answered a context-only call with nothing to hand over; "
                "set cache_transceiver_config.backend",
                field="cache_transceiver_config.backend",
            )
        return {
            name: getattr(params, name) for name in wire.transferred_fields(self._bindings.capabilities.disagg_fields)
        }

    async def _step(self, request: GenerateRequest, inflight: TrtllmInflightRequest) -> EngineOutput:
        """The next result, or the error that ends the request. The deadlines are kept here: the vendor has none."""
        if self._failed is not None:
            raise EngineFailed(self._failed.message)
        fetching = inflight.fetches_kv and not inflight.started
        try:
            step = await inflight.step()
        except TimeoutError as exc:
            raise self._late(request, inflight) from exc
        except VendorError as exc:
            raise self._translated(exc.raised, inflight) from exc.raised
        self._last_result_at = time.monotonic()
        if fetching:
            inflight.due_in(request.deadline - time.time())
        return step

    def _late(self, request: GenerateRequest, inflight: TrtllmInflightRequest) -> DynamoError:
        if self._failed is not None:
            return EngineFailed(self._failed.message)
        if inflight.bound is not None and not inflight.started:
            return timeout_error(ticket_of(request), inflight.bound)
        return DeadlineExceeded(f"the deadline passed after {inflight.age_s():.1f} s in the engine")

    def _translated(self, exc: Exception, inflight: TrtllmInflightRequest | None = None) -> DynamoError:
        """Whether an error of the vendor's is one request's, or the engine's end."""
        if not self._healthy():
            return self.fail(f"TensorRT-LLM's executor has shut down: {exc}")
        if isinstance(exc, (self._bindings.request_error, ValueError, TypeError, AssertionError)):
            if inflight is not None and inflight.fetches_kv and not inflight.started:
                return TransferFailed(f"TensorRT-LLM could not take the prompt's KV over: {exc}")
            return RequestRejected(f"TensorRT-LLM refused the request: {exc}")
        return self.fail(f"TensorRT-LLM failed: {type(exc).__name__}: {exc}")

    def _chunk(self, request: GenerateRequest, inflight: TrtllmInflightRequest, step: EngineOutput) -> Chunk:
        """Raises for an end that is no answer."""
        if step.is_broken:
            raise _broken(request, inflight, step)
        return chunk_of(step, self._stats_of(inflight))

    def _stats_of(self, inflight: TrtllmInflightRequest) -> PhaseTimings:
        is_reported = self._bindings.capabilities.cached_tokens
        return inflight.stats(cached_tokens=int(inflight.result.cached_tokens or 0) if is_reported else 0)

    def _finish(self, inflight: TrtllmInflightRequest) -> None:
        """The request is over. Its call, if it is not, is wound down by a task of the engine's."""
        if inflight.finished or self._failed is not None:
            self._forget(inflight)
            return
        inflight.is_draining = True
        task = asyncio.get_running_loop().create_task(
            inflight.abort_and_drain(), name=f"wind-down-{inflight.request_id}"
        )
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

    # --- tickets and statistics ------------------------------------------------------------------------

    def release(self, ticket_id: str, outcome: ReleaseOutcome) -> None:
        """Redeemed is bookkeeping: the vendor frees the KV itself, and does not tell."""
        self._transfers.release(ticket_id, outcome)

    def stats(self) -> EngineStats:
        """The vendor tells of iterations, and an idle engine has none: its last row may be old."""
        counts, calls = self._stats_poller.counts, len(self._inflight)
        if not calls and not len(self._transfers):
            counts = counts._replace(kv_blocks_used=0)
        return engine_stats(counts, calls, self._transfers)


def _broken(request: GenerateRequest, inflight: TrtllmInflightRequest, step: EngineOutput) -> DynamoError:
    """Return the error for a request that the vendor ended and this worker did not."""
    if inflight.fetches_kv and not inflight.had_tokens:
        error = TransferTimeout if step.finish == "timeout" else TransferFailed
        return error(f"TensorRT-LLM gave up taking the prompt's KV over ({step.finish})")
    if step.finish == "timeout":
        return DeadlineExceeded("TensorRT-LLM timed the request out")
    return MigrationFailed(f"TensorRT-LLM ended request {request.request_id} with {step.finish!r}")
