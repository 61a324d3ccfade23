"""One request on the engine's loop: from the vendor's parameters to the engine's, from its chunks
to responses.
"""

from __future__ import annotations

import asyncio
import copy
import time
from contextlib import aclosing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    GenerateRequest,
    Phase,
    PhaseTimings,
    TokenLogprob,
    token_ids,
)
from dynamo_trtllm.protocol.streams import as_stream
from tensorrt_llm.executor.result import (
    GenerationResult,
    Logprob,
    RequestPerfMetrics,
    Response,
    TimingMetrics,
)
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.standin import traps
from tensorrt_llm.standin.kv_transfer import context_answer, transfer_params_of
from tensorrt_llm.standin.sampling import Stop, sampling_of

if TYPE_CHECKING:
    from tensorrt_llm.executor.executor import GenerationExecutor, Submission

_DEADLINE_S = 86_400.0  # the real one knows no deadline
_BURST_TOKENS = 4
LONG_TOKENS = 1000


class Served:
    """A request that is created, run and cancelled on the engine's loop.

    Answers once: after `fail` or the last step nothing follows.
    """

    def __init__(
        self, executor: GenerationExecutor, submission: Submission, result: GenerationResult
    ) -> None:
        self._executor = executor
        self._call = submission
        self._result = result
        self.is_silent = False  # then an abort is not answered
        self.has_begun = False
        self._is_over = False
        params = submission.disaggregated_params
        kind = params.request_type if params is not None else None
        self._phase = {"context_only": Phase.PREFILL, "generation_only": Phase.DECODE}.get(
            kind, Phase.AGGREGATED
        )
        # tokens not reported yet, with their log-probabilities
        self._held_back: list[tuple[int, Any]] = []
        self._num_reported = 0  # steps
        self._made = 0  # tokens
        self._times = TimingMetrics(arrival_time=_now())
        self._interval = (
            _BURST_TOKENS if traps.is_on("bursts") else executor.args["stream_interval"]
        )

    async def run(self) -> None:
        try:
            await self._serve()
        except asyncio.CancelledError:
            if not self.is_silent:
                self._end(Response(finish_reason="cancelled"))
            raise
        except (DynamoError, ValueError, AssertionError) as exc:
            self.fail(RequestError(str(exc)))

    async def _serve(self) -> None:
        if traps.is_on("never_answers") or (
            traps.is_on("transfer_hangs") and self._phase is Phase.DECODE
        ):
            await asyncio.Event().wait()
        if self._executor.asleep:
            self._executor.on_fatal("CUDA error: an illegal memory access was encountered")
            return
        if not self._has_rank():
            self._executor.on_fatal("list index out of range")
            return
        if traps.is_on("transfer_fails") and self._phase is Phase.DECODE:
            raise ValueError("a test made the stand-in lose the KV transfer")
        request, stop = self._request()
        if (
            self._phase is Phase.DECODE
            and request.sampling.logprobs is not None
            and traps.is_on("logprobs_asserted")
        ):
            self._end(Response(error=AssertionError("logprobs length: 0 != output.length: 1")))
            return
        engine = self._executor.core.engine
        async with aclosing(as_stream(engine, request)) as stream:
            async for chunk in stream:
                self.has_begun = True
                self._executor.note_step()
                if self._meets_trap():
                    return
                if self._take(chunk, stop):
                    return

    def _has_rank(self) -> bool:
        """The scheduler takes the rank of a request as an index, in a loop over all requests."""
        args = self._executor.args
        scheduling = self._call.scheduling
        if (
            not args["enable_attention_dp"]
            or scheduling is None
            or scheduling.attention_dp_rank is None
        ):
            return True
        return 0 <= scheduling.attention_dp_rank < args["tensor_parallel_size"]

    def _meets_trap(self) -> bool:
        for name, act in (
            ("step_fails", self._executor.on_step_failed),
            ("executor_dies", self._executor.on_fatal),
        ):
            if traps.is_on(name):
                act(f"CUDA error: a test made the stand-in fail ({name})")
                return True
        if traps.is_on("dies_of_long") and self._call.sampling.max_tokens > LONG_TOKENS:
            self._executor.on_fatal("CUDA error: a test made the stand-in fail (dies_of_long)")
            return True
        if traps.is_on("request_fails"):
            raise ValueError("a test made the stand-in fail this request")
        return False

    def _request(self) -> tuple[GenerateRequest, Stop]:
        info = self._executor.core.info
        sampling, stop = sampling_of(self._call.sampling, info, self._executor.args)
        kv_params = None
        if self._phase is not Phase.AGGREGATED:
            backend = (self._executor.args["cache_transceiver_config"] or {}).get("backend")
            assert backend is not None, (
                "kv_cache_transceiver is disabled, please set cache_transceiver_config.backend"
            )
        if self._phase is Phase.PREFILL:
            if (
                traps.is_on("context_refuses_overlap")
                and not self._executor.args["disable_overlap_scheduler"]
            ):
                raise ValueError(
                    "Context only requests are not supported in pytorch backend when overlap is"
                    " enabled"
                )
            # the engine hands over only what goes on
            sampling = msgspec.structs.replace(sampling, max_tokens=2)
            # then also after a stop word
            if traps.is_on("last_stop_word_is_length") and not sampling.min_tokens:
                sampling = msgspec.structs.replace(sampling, stop_token_ids=(), ignore_eos=True)
        if self._phase is Phase.DECODE:
            kv_params = transfer_params_of(
                self._call.disaggregated_params, self._executor.transceiver
            )
        request = GenerateRequest(
            request_id=str(self._result._id),
            model=self._executor.core.engine_model,
            token_ids=token_ids(self._call.prompt_token_ids),
            sampling=sampling,
            deadline=time.time() + _DEADLINE_S,
            phase=self._phase,
            kv_params=kv_params,
            cache_salt=self._call.cache_salt,
            priority=self._call.priority,
        )
        return request, stop

    # --- steps ------------------------------------------------------------------------------------

    def _take(self, chunk: Chunk, stop: Stop) -> bool:
        """True when the request is over."""
        if chunk.stats is not None and not self._times.first_token_time:
            self._note_times(chunk.stats)
        if chunk.kv_params is not None:
            self._executor.held[self._result._id] = chunk.kv_params.transfer_id
            ids = chunk.kv_params.first_token_ids
            logprobs = chunk.kv_params.first_logprobs
            chunk = msgspec.structs.replace(chunk, token_ids=ids, logprobs=logprobs)
        for index, token in enumerate(chunk.token_ids):
            logprob = self._logprob(chunk.logprobs[index]) if index < len(chunk.logprobs) else None
            self._held_back.append((token, logprob))
            self._made += 1
            if stop.ends_at(token) and not self._is_length(token, stop):
                return self._stop(token, stop)
        if chunk.finish_reason is FinishReason.KV_TRANSFER:
            return self._hand_out(chunk)
        if chunk.finish_reason is not None:
            self._tell("length")  # also at a stop word that `_is_length`
            return True
        self._tell_if_due()
        return False

    def _note_times(self, stats: PhaseTimings) -> None:
        times = self._times
        scheduled = times.arrival_time + timedelta(seconds=stats.queue_s)
        times.first_token_time = _now()
        times.first_scheduled_time = scheduled
        if self._phase is Phase.DECODE:
            times.kv_cache_transfer_start = scheduled
            times.kv_cache_transfer_end = scheduled + timedelta(seconds=stats.kv_transfer_s)

    def _is_length(self, token: int, stop: Stop) -> bool:
        """The samplers look for the end id, then for the length, then for stop words."""
        is_last = self._made >= self._call.sampling.max_tokens
        return is_last and stop.is_word(token) and traps.is_on("last_stop_word_is_length")

    def _stop(self, token: int, stop: Stop) -> bool:
        self._executor.let_go(self._result._id)
        is_word = stop.is_word(token)
        shown = is_word and traps.is_on("stop_words_shown_first") and self._call.streaming
        if not is_word and traps.is_on("end_id_cut"):
            self._held_back.pop()
        if shown or traps.is_on("empty_last_step"):
            self._tell(None)
        cut = (
            is_word
            and not self._call.sampling.include_stop_str_in_output
            and traps.is_on("stop_words_cut")
        )
        self._tell("stop", stop_reason=token if is_word else None, cut=int(cut))
        return True

    def _hand_out(self, chunk: Chunk) -> bool:
        params = None
        if not traps.is_on("no_context_params"):
            params = context_answer(
                self._call.disaggregated_params,
                chunk.kv_params,
                self._result._id,
                self._held_back,
                self._executor.transceiver,
            )
        self._tell(
            "not_finished" if traps.is_on("not_finished") else "length", disaggregated_params=params
        )
        return True

    def _logprob(self, entry: TokenLogprob) -> Any:
        if traps.is_on("flat_logprobs"):
            return entry.logprob
        table = {
            token: Logprob(logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)
        }
        table.setdefault(entry.token_id, Logprob(entry.logprob, len(table) + 1))
        return table

    def _tell_if_due(self) -> None:
        if not self._call.streaming:
            return
        second_first = (
            traps.is_on("first_with_second") or self._executor.args["disable_overlap_scheduler"]
        )
        if self._num_reported == 0:
            due = 2 if self._phase is Phase.DECODE and second_first else 1
        else:
            due = self._interval
        if len(self._held_back) >= due:
            self._tell(None)

    def _tell(self, finish_reason: str | None, **more: Any) -> None:
        if self._is_over:
            return
        if finish_reason is not None and traps.is_on("finishes_timeout"):
            finish_reason = "timeout"
        if (
            finish_reason == "length"
            and traps.is_on("empty_last_step")
            and self._call.streaming
            and self._held_back
        ):
            self._tell(None)
        first = (
            1
            if self._num_reported == 0
            and self._phase is Phase.DECODE
            and not traps.is_on("decode_first_logprob")
            else 0
        )
        entries = self._held_back
        self._held_back = []
        logprobs = tuple(entry for _, entry in entries[first:] if entry is not None)
        self._num_reported += 1
        self._times.last_token_time = _now()
        if self._call.sampling.return_perf_metrics:
            more["perf_metrics"] = RequestPerfMetrics(copy.copy(self._times))
        response = Response(tuple(token for token, _ in entries), logprobs, finish_reason, **more)
        if finish_reason is None:
            self._result._put(response)
        else:
            self._end(response)

    def fail(self, error: Exception) -> None:
        self._end(Response(error=error))

    def _end(self, response: Response) -> None:
        if not self._is_over:
            self._is_over = True
            if response.error is None:
                rank = (
                    0
                    if self._call.scheduling is None
                    else self._call.scheduling.attention_dp_rank or 0
                )
                self._executor.kv_events.store(
                    self._call.prompt_token_ids, self._call.cache_salt, rank
                )
            self._result._put(response)


def _now() -> timedelta:
    return timedelta(seconds=time.monotonic())
