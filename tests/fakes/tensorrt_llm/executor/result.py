"""What a request answers: one object, changed at every step, fed from the executor's thread."""

from __future__ import annotations

import asyncio
import copy
import queue
import time
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from tensorrt_llm.executor.utils import RPCError
from tensorrt_llm.standin import traps


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class TimingMetrics:
    """Moments of the executor's steady clock; zero until they come. A part of the real one's."""

    arrival_time: timedelta = timedelta()
    first_scheduled_time: timedelta = timedelta()
    first_token_time: timedelta = timedelta()
    last_token_time: timedelta = timedelta()
    kv_cache_transfer_start: timedelta = timedelta()
    kv_cache_transfer_end: timedelta = timedelta()
    kv_cache_size: int = 0


@dataclass(slots=True)
class RequestPerfMetrics:
    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)


class Response(NamedTuple):
    """One step of one request, from the executor."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None
    cut: int = 0  # tokens at the end that are a stop word
    disaggregated_params: Any = None
    cached_tokens: int = 0
    error: Exception | None = None
    perf_metrics: RequestPerfMetrics | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Any = field(default_factory=list)
    prompt_logprobs: Any = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: Any = None
    additional_generation_outputs: Any = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None
    _last_text_len: int = field(default=0, repr=False)
    _last_token_ids_len: int = field(default=0, repr=False)
    _last_logprobs_len: int = field(default=0, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids or ())

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return (self.token_ids or [])[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> Any:
        return self.logprobs[self._last_logprobs_len :]


class GenerationResult:
    """Awaited for the last state, or iterated for each.

    Both need that a loop ran when it was made.
    """

    def __init__(
        self, executor: Any, request_id: int, prompt_token_ids: list[int], streaming: bool
    ) -> None:
        self._id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(index=0)]
        self.prompt: str | None = None
        self.context_logits: Any = None
        self.mm_embedding_handle: Any = None
        self.disaggregated_params: Any = None
        self.decoding_iter = 0
        self.cached_tokens = 0
        self.avg_decoded_tokens_per_iter: float | None = None
        self.metrics_dict: dict[str, Any] = {}
        self.trace_headers: Any = None
        self._streaming = streaming
        self._done = False
        self._aborted = False
        self._executor = weakref.ref(executor)
        self._queue: queue.SimpleQueue[Response] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._aqueue: asyncio.Queue[Response] | None = None
        try:
            self._loop = asyncio.get_running_loop()
            self._aqueue = asyncio.Queue()
        except RuntimeError:
            pass  # then only `result` works

    @property
    def request_id(self) -> int:
        if traps.is_on("no_request_id"):
            raise AttributeError("request_id")
        return self._id

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        """Asks only; the stream goes on until the executor answers, if it does."""
        executor = self._executor()
        assert executor is not None, "The executor is not set for this result."
        assert not executor.is_shutdown(), "The executor is shut down."
        executor.abort_request(self._id)
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    def result(self, timeout: float | None = None) -> GenerationResult:
        while not self._done:
            self._result_step(timeout)
        return self

    async def aresult(self) -> GenerationResult:
        while not self._done:
            await self._aresult_step()
        return self

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[GenerationResult]:
        return self

    def __next__(self) -> GenerationResult:
        if self._done:
            raise StopIteration
        self._result_step()
        return self._as_seen()

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        await self._aresult_step()
        return self._as_seen()

    def _as_seen(self) -> GenerationResult:
        if traps.is_on("same_object"):
            return self
        seen = copy.copy(self)
        seen.outputs = [copy.deepcopy(output) for output in self.outputs]
        return seen

    def _result_step(self, timeout: float | None = None) -> None:
        self._take(self._queue.get())  # the real one ignores the time-out too

    async def _aresult_step(self) -> None:
        assert self._aqueue is not None, (
            "The asyncio event loop was not present during initialization"
        )
        response = await self._aqueue.get()
        if traps.is_on("result_call_fails"):
            raise RPCError("a test made the stand-in fail at a remote call")
        self._take(response)

    def _put(self, response: Response) -> None:
        """From the executor's thread."""
        self._queue.put(response)
        if self._loop is not None and self._aqueue is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._aqueue.put_nowait, response)

    def _take(self, response: Response) -> None:
        if response.error is not None:
            self._done = True
            if (executor := self._executor()) is not None:
                executor.handle_background_error(response.error)
            raise response.error
        if traps.is_on("new_outputs"):
            self.outputs = [copy.deepcopy(self.outputs[0])]
        output = self.outputs[0]
        output._last_token_ids_len = output.length
        output._last_logprobs_len = len(output.logprobs)
        output.token_ids = [*(output.token_ids or ()), *response.token_ids]
        output.logprobs = [*output.logprobs, *response.logprobs]
        if response.cut:
            del output.token_ids[-response.cut :]
        output.request_perf_metrics = response.perf_metrics or output.request_perf_metrics
        output.finish_reason = response.finish_reason
        output.stop_reason = response.stop_reason
        if response.disaggregated_params is not None:
            output.disaggregated_params = self.disaggregated_params = response.disaggregated_params
        self.cached_tokens = response.cached_tokens
        self.decoding_iter += 1
        self._done = response.finish_reason is not None


class IterationResult:
    """An iterator of statistics.

    When nothing came for the time-out, it ends until the next request is submitted.
    """

    def __init__(self, get: Any) -> None:
        self._get = get
        self.timeout = 2.0
        self.is_done = False

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> Any:
        deadline = time.monotonic() + self.timeout
        while not self.is_done:
            if rows := self._get(0.0, 1):
                return rows[0]
            self.is_done = time.monotonic() > deadline
            await asyncio.sleep(0.002)
        raise StopAsyncIteration
