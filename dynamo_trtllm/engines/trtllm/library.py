"""Run calls with a built LLM: submit them, read their results, and abort them. Also poll the
executor's statistics.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_trtllm.engines.external.engine import run_in_daemon_thread
from dynamo_trtllm.engines.external.library import Counts, ResultReceiver, token_logprob
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.bindings import TrtllmBindings
from dynamo_trtllm.engines.trtllm.endpoint_probe import EndpointProbe
from dynamo_trtllm.engines.trtllm.model_limits import TrtllmModelLimits
from dynamo_trtllm.engines.trtllm.reports.kv_cache import KvCacheSize, kv_cache_size, size_change
from dynamo_trtllm.engines.trtllm.reports.statistics import StatsPoller
from dynamo_trtllm.engines.trtllm.reports.steps import StepReader
from dynamo_trtllm.engines.trtllm.requests import (
    NO_END,
    TrtllmRequest,
    reported_phases,
)
from dynamo_trtllm.engines.trtllm.transfer_params import context_params, pack, unpack
from dynamo_trtllm.engines.trtllm.watchdog import BlockingCalls
from dynamo_trtllm.observability.logging import log_thread_stacks
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    EngineFailed,
    MigrationFailed,
    RequestRejected,
    TransferFailed,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvTransferParams,
    TokenLogprob,
    token_ids,
)

log = logging.getLogger(__name__)

# What `generate_async` raises, besides RequestError, for a request that it does not accept.
# NotImplementedError is raised for a request that the release has no code for
# (request_handlers/handler_base.py of Dynamo 1.7 counts it as an error of the client, too).
_REJECTIONS = (ValueError, TypeError, AssertionError, NotImplementedError)


def error_text(exc: BaseException) -> str:
    """Return the class and text of an error of TensorRT-LLM.

    A hint follows if the error or one of its causes matches one of `LibraryReleases.error_hints`.
    """
    causes: list[str] = []
    cause: BaseException | None = exc
    while cause is not None:
        causes.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(causes)
    for pattern, hint in LIBRARY.error_hints.items():
        if re.search(pattern, text):
            return f"{causes[0]}; {hint}"
    return causes[0]


REPORT_S = 10.0  # longest wait for the size of the KV cache
# Without a result or an iteration for this time, the executor counts as stalled.
_STALL_S = 300.0


@dataclass(kw_only=True, eq=False)
class TrtllmLibrary:
    """The `Library` of one LLM."""

    can_abort_fetch = False  # an abort during the fetch breaks the transfer
    keeps_unfetched_kv = True  # see `TrtllmCall.release_kv`

    bindings: TrtllmBindings
    llm: Any
    model_limits: TrtllmModelLimits
    instance_id: int  # id of the worker
    kv_transfer_ttl_s: float  # time until a KV transfer expires
    # Seconds until TensorRT-LLM frees KV that was not fetched; infinity if it never frees this KV.
    kv_timeout_s: float = math.inf
    # the cache transceiver, CPP or PYTHON; None: TensorRT-LLM chooses it
    runtime: str | None = None
    transfer_hint: str = ""  # see `Library.transfer_hint`
    probe: EndpointProbe = field(default_factory=EndpointProbe)
    # Calls of the library that are made on the event loop.
    calls: BlockingCalls = field(default_factory=BlockingCalls)
    last_result_at: float = field(default_factory=time.monotonic)
    # tokens in a KV block, as this worker registers them; 0 before it has registered
    block_tokens: int = 0
    # The numbers of context-only calls.
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        # Attention-DP ranks have KV blocks of their own.
        num_kv_ranks = self.model_limits.dp_ranks or 1
        self._stats_poller = StatsPoller(self.bindings.reader(self.llm, "get_stats"), num_kv_ranks)
        # If all KV blocks belong to transfers, the executor makes no step. That may last until the
        # transfers expire, so only twice this time counts as a stall.
        self._stall_s = max(_STALL_S, 2 * self.kv_transfer_ttl_s)

    @property
    def iterated_at(self) -> float:
        """When the executor last reported an iteration, by `time.monotonic()`."""
        return self._stats_poller.changed_at

    def poll_stats(self, step_reader: StepReader | None = None) -> None:
        """Start polling statistics. Some releases have none before their first request."""
        self._stats_poller.step_reader = step_reader
        self._stats_poller.start()

    async def kv_cache_size(self) -> KvCacheSize:
        """Return the size of the KV cache of one rank, as the running engine reports it after its
        first request.

        The size is read from the statistics. If the statistics do not have it, it is read from
        `LLM.get_kv_cache_capacity`, which newer builds have and Dynamo 1.7 calls, too
        (dynamo/trtllm/engine.py). A value that is not reported within REPORT_S seconds is 0.
        """
        size = KvCacheSize()
        if self._stats_poller.is_started:
            size = await self._stats_poller.first_kv_cache(REPORT_S)
        if size.block_tokens or not self.bindings.has_kv_cache_capacity:
            return size
        try:
            async with asyncio.timeout(REPORT_S):
                capacity = await run_in_daemon_thread(
                    self.llm.get_kv_cache_capacity, name="trtllm-capacity"
                )
        except Exception as exc:  # noqa: BLE001 - of any class, as for statistics; the size is assumed then
            log.warning("no KV cache capacity from TensorRT-LLM: %s: %s", type(exc).__name__, exc)
            return size
        found = kv_cache_size(capacity)
        return found if found.block_tokens else size

    def prepare(self, request: GenerateRequest, kv_params: KvTransferParams | None) -> TrtllmCall:
        """See `Library.prepare`."""
        converted = TrtllmRequest(request, self.model_limits)
        disagg: dict[str, Any] | None = None
        if converted.exports_kv:
            disagg = context_params(
                self.instance_id, next(self._numbers), known=self.bindings.disagg_fields
            )
        elif kv_params is not None:
            if converted.max_tokens <= len(kv_params.first_token_ids):
                raise RequestRejected(
                    f"KV transfer {kv_params.transfer_id} already has all requested tokens; nothing"
                    " is left to decode"
                )
            known = self.bindings.disagg_fields
            logprob = self.bindings.classes["Logprob"]
            vocab_size = self.model_limits.info.vocab_size
            disagg = unpack(
                kv_params, known=known, logprob=logprob, vocab_size=vocab_size, runtime=self.runtime
            )
        return TrtllmCall(self, request, converted, disagg)

    def health(self, waiting_since: float | None) -> str:
        """See `Library.health`."""
        if not self._is_healthy():
            return "TensorRT-LLM's executor shut down after an error; see the worker's log"
        if self._stats_poller.has_reported and waiting_since is not None:
            progress_at = max(waiting_since, self.last_result_at, self._stats_poller.changed_at)
            stalled_s = time.monotonic() - progress_at
            if stalled_s > self._stall_s:
                self._log_stall()
                return (
                    "TensorRT-LLM is stalled: requests wait, and no iteration for"
                    f" {stalled_s:.0f} s"
                )
        if not self.block_tokens:
            return ""
        return size_change(self.block_tokens, self._stats_poller.kv_cache)

    def _log_stall(self) -> None:
        """Log what a report of a stall should contain (such as issue 16300 of TensorRT-LLM), before
        this process ends.
        """
        for row in self._stats_poller.last_rows:
            text = f"TensorRT-LLM is stalled; the last statistics: {json.dumps(row, default=str)}"
            log.error(text)  # an argument of `error` would be cut to `VALUE_CHARS` characters
        log_thread_stacks(log)

    def _is_healthy(self) -> bool:
        try:
            with self.calls.note("_check_health"):
                return self.bindings.healthy(self.llm)
        except Exception:  # noqa: BLE001 - a library that raises any error here is not healthy
            return False

    def submit_error(self, exc: Exception) -> DynamoError:
        """Convert an exception of `generate_async`, which checks a request in this process before
        it sends it.
        """
        if self._is_healthy() and isinstance(
            exc, (self.bindings.classes["RequestError"], *_REJECTIONS)
        ):
            return RequestRejected(f"TensorRT-LLM rejected the request: {exc}")
        return self._engine_error(exc)

    def result_error(self, exc: Exception, receiver: ResultReceiver) -> DynamoError:
        """Convert an exception raised while a result was awaited.

        RequestError belongs to one request, any other class to the executor, as Dynamo's handler
        has it (request_handlers/handler_base.py). Remote calls and queues raise classes of their
        own, such as RPCError.
        """
        if self._is_healthy() and isinstance(exc, self.bindings.classes["RequestError"]):
            if receiver.is_fetching:
                return TransferFailed(f"TensorRT-LLM failed to receive the KV of the prompt: {exc}")
            return RequestRejected(f"TensorRT-LLM rejected the request: {exc}")
        return self._engine_error(exc)

    def _engine_error(self, exc: Exception) -> EngineFailed:
        what = "TensorRT-LLM failed" if self._is_healthy() else "TensorRT-LLM's executor shut down"
        return EngineFailed(f"{what}: {error_text(exc)}")

    def counts(self, *, is_idle: bool) -> Counts:
        """See `Library.counts`.

        An idle engine has no iterations, so the used KV blocks of the last one don't count.
        """
        counts = self._stats_poller.counts
        return counts._replace(kv_blocks_used=0) if is_idle else counts

    async def aclose(self) -> None:
        """See `Library.aclose`."""
        await asyncio.to_thread(self._stats_poller.stop)


class TrtllmCall:
    """One call of `generate_async`.

    The result object of the call must be read to its end, also after an abort.
    """

    def __init__(
        self,
        library: TrtllmLibrary,
        request: GenerateRequest,
        converted: TrtllmRequest,
        disagg: dict[str, Any] | None,
    ) -> None:
        self.exports_kv = converted.exports_kv
        self.stop_ids = converted.stop_ids
        self.num_generated = 0
        self.cached_tokens = 0
        self._library = library
        self._request_id = request.request_id
        self._converted = converted
        self._disagg = disagg  # arguments of DisaggregatedParams
        self._fetches_kv = request.kv_params is not None
        self._result: Any = None
        self._last_result_at = math.inf  # when the last result came; infinity: none has come
        # The number of alternatives per token; None if no log-probabilities are wanted.
        self._num_alternatives = request.sampling.logprobs
        # Log-probabilities of the tokens that the prefill worker has generated.
        self._first_logprobs: Sequence[TokenLogprob] = ()
        if request.kv_params is not None:
            self._first_logprobs = request.kv_params.first_logprobs
        self._num_unreported = 0  # tokens at the start without a log-probability from TensorRT-LLM
        self._last_token: int | None = None  # the last output token

    async def run(self, receiver: ResultReceiver) -> None:
        """See `LibraryCall.run`. Returns at the end of the call."""
        library = self._library
        arguments = library.bindings.arguments(
            self._converted, self._disagg, vocab_size=library.model_limits.info.vocab_size
        )
        endpoint = None if self._disagg is None else self._disagg.get("ctx_info_endpoint")
        if endpoint:
            await library.probe.check(endpoint)
        try:
            with library.calls.note("generate_async"):
                result = library.llm.generate_async(**arguments)
                self._result = result
            # None: without streaming, there is one result, which is awaited.
            results = aiter(result) if self._converted.keywords["streaming"] else None
        except Exception as exc:
            raise library.submit_error(exc) from exc
        if log.isEnabledFor(logging.DEBUG):
            # Some releases may not have this attribute. No request fails because of a log line.
            known_as = getattr(result, "request_id", "unknown")
            log.debug("request %s has in TensorRT-LLM's log the id %s", self._request_id, known_as)
        while result.outputs[0].finish_reason is None:
            try:
                next_result = result if results is None else anext(results)
                await next_result
            except StopAsyncIteration:
                break
            except Exception as exc:
                raise library.result_error(exc, receiver) from exc
            self._last_result_at = time.monotonic()
            library.last_result_at = self._last_result_at
            receiver.on_result(result)
            if results is None:
                break
        if result.outputs[0].finish_reason is None:
            # As for other ends that the library does not explain: no worker continues the request.
            raise MigrationFailed("TensorRT-LLM ended the request without a finish reason")

    def read(self, result: Any) -> tuple[Chunk, str | None]:
        """See `LibraryCall.read`. Each result has all tokens so far."""
        output = result.outputs[0]
        start = self.num_generated
        if self._library.bindings.is_since_1_2:
            self.cached_tokens = int(result.cached_tokens or 0)
        new = list(output.token_ids[start:])
        if start == 0 and new and output.logprobs is not None:
            self._num_unreported = max(0, len(output.token_ids) - len(output.logprobs))
        if new:
            self._last_token = new[-1]
        if output.finish_reason == "stop":
            stripped = self._stripped_stop(self._last_token, output.stop_reason)
            if stripped is not None:
                new.append(stripped)
                self._last_token = stripped
        self.num_generated += len(new)
        finish = output.finish_reason
        if finish == "length" and self._last_token in self.stop_ids:
            # The samplers look for the length before they look for stop words
            # (_handle_stop_criteria in _torch/pyexecutor/sampler.py, main at 00043967).
            finish = "stop"
        logprobs: tuple[TokenLogprob, ...] = ()
        if self._num_alternatives is not None:
            reported = output.logprobs or ()
            logprobs = tuple(
                self._logprob(reported, start + n, token) for n, token in enumerate(new)
            )
        return Chunk(token_ids=token_ids(new), logprobs=logprobs), finish

    def _stripped_stop(self, last: int | None, stop_reason: int | str | None) -> int | None:
        """Return the stop token that TensorRT-LLM stripped from the output; None if there is none.

        The output of an `Engine` contains the stop token.
        """
        if last is not None and last in self.stop_ids:
            return None
        # A stop token other than the end token is named by `stop_reason`.
        stop_id: int = self._converted.sampling["end_id"]
        if isinstance(stop_reason, int):
            stop_id = stop_reason
        return None if stop_id == NO_END else stop_id

    def _logprob(self, reported: Sequence[Any], position: int, token: int) -> TokenLogprob:
        if position < len(self._first_logprobs):
            return self._first_logprobs[position]
        index = position - self._num_unreported
        if 0 <= index < len(reported):
            num_alternatives = self._num_alternatives or 0
            return token_logprob("TensorRT-LLM", token, reported[index], num_alternatives)
        if token in self.stop_ids:
            return TokenLogprob(token, -math.inf)  # unknown: its entry was stripped with the token
        raise RequestRejected(
            "TensorRT-LLM returned no log-probability for a token; omit logprobs", field="logprobs"
        )

    def phases(self, result: Any) -> dict[str, float]:
        """See `LibraryCall.phases`.

        The executor reports its times if the argument `return_perf_metrics` is true.
        """
        metrics = getattr(result.outputs[0], "request_perf_metrics", None)
        times = getattr(metrics, "timing_metrics", None)
        return {} if times is None else reported_phases(times, fetches_kv=self._fetches_kv)

    def export(self, result: Any, chunk: Chunk) -> tuple[Chunk, bytes]:
        """See `LibraryCall.export`."""
        params = result.outputs[0].disaggregated_params
        if params is None:
            raise RequestRejected(
                "TensorRT-LLM returned no disaggregated_params for a context-only call; "
                "set cache_transceiver_config.backend",
                field="cache_transceiver_config.backend",
            )
        bindings = self._library.bindings
        # Ids are 64-bit integers, the state is bytes. `disagg_fields` has no logits (never
        # requested), schedule_style (context first is the default) and ctx_usage (the frontend
        # counts tokens). request_type is left out here: each call sets its own.
        values = {
            name: getattr(params, name)
            for name in sorted(bindings.disagg_fields - {"request_type"})
        }
        # If the result has no id, the id that this call was given is used.
        given = self._disagg or {}
        if not values.get("disagg_request_id") and "disagg_request_id" in given:
            values["disagg_request_id"] = given["disagg_request_id"]
        first_token = token_ids(values["first_gen_tokens"][:1])
        state = pack(values, release=bindings.release)
        return Chunk(token_ids=first_token, logprobs=chunk.logprobs), state

    def abort(self) -> None:
        """See `LibraryCall.abort`. A stopped executor is not an error."""
        if self._result is None:
            return
        try:
            with self._library.calls.note("abort"):
                self._result.abort()
        except Exception as exc:  # noqa: BLE001 - the errors of its queues and RPCs have no common base class
            log.warning("TensorRT-LLM could not abort a request: %s", exc)

    def release_kv(self, *, has_expired: bool) -> float | None:
        """See `LibraryCall.release_kv`.

        A context-only call keeps its KV only if it continues in decode.

        An abort would not free the KV: after the final result, no version of TensorRT-LLM finds the
        request by the id that an abort has (`BaseWorker.abort_request` in executor/base_worker.py,
        main at 00043967; executor/worker.py before 1.2). Only kv_transfer_timeout_ms frees the KV.
        """
        finish = None if self._result is None else self._result.outputs[0].finish_reason
        continues_in_decode = finish in ("length", "not_finished")
        if not continues_in_decode:
            return None
        return self._last_result_at + self._library.kv_timeout_s
