"""Run calls with a loaded AsyncLLM: submit them, read their outputs, and abort them.

KV that was not fetched is freed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from dynamo_trtllm.engines.external.library import ENDS, Counts, ResultReceiver, token_logprob
from dynamo_trtllm.engines.vllm.bindings import VllmBindings
from dynamo_trtllm.engines.vllm.requests import VllmModelLimits, VllmRequest
from dynamo_trtllm.engines.vllm.transfer_params import (
    KvReleaser,
    pack,
    read_parts,
    side_channel_of,
    unpack,
)
from dynamo_trtllm.engines.warm_up import WarmUpStep
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.protocol.errors import (
    DynamoError,
    EngineFailed,
    MigrationFailed,
    RequestRejected,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    GenerateRequest,
    KvTransferParams,
    TokenLogprob,
    token_ids,
)

log = logging.getLogger(__name__)

# Methods of the worker extension.
_RELEASE = "dynamo_release_kv"
_BIND_LIFETIME = "dynamo_bind_lifetime"
_PASS = "dynamo_run_pass"
_COUNT_COMPILATIONS = "dynamo_count_compilations"
_NOT_RESPONDING = "vLLM's workers do not respond"
_RPC_S = 10.0  # longest wait for other methods than passes
_PASS_S = 600.0  # longest wait for a pass: compilers are slow on a busy host
_ABORT_S = 5.0  # longest wait for aborts when the engine shuts down


@dataclass(eq=False)
class VllmLibrary:
    """The `Library` of one AsyncLLM."""

    transfer_hint = "; see NixlConnector's lines in its log"
    can_abort_fetch = True
    keeps_unfetched_kv = False

    bindings: VllmBindings
    llm: Any
    model_limits: VllmModelLimits
    last_counts: Callable[[], Counts]  # returns the counters of the last step
    guard: TransferGuard  # checks where decode calls connect

    def __post_init__(self) -> None:
        self.kv_releaser = KvReleaser(partial(self._call_workers, _RELEASE))
        self._numbers = itertools.count(1)  # the numbers of calls, parts of their ids
        self._tasks: set[asyncio.Task[None]] = set()  # the tasks of aborts

    async def _call_workers(
        self, method: str, argument: Any, *, limit_s: float = _RPC_S, failure: str = _NOT_RESPONDING
    ) -> Any:
        """Return what a method of the worker extension returns at each rank.

        Raises EngineFailed.
        """
        try:
            return await self.llm.collective_rpc(method, timeout=limit_s, args=(argument,))
        except Exception as exc:  # vLLM raises a bare Exception for errors in its workers
            raise EngineFailed(f"{failure}: {exc}") from exc

    async def bind_lifetime(self) -> None:
        """Make vLLM's processes end with this one, even if this one is killed.

        Raises EngineFailed if they do not respond.
        """
        if not all(await self._call_workers(_BIND_LIFETIME, os.getpid())):
            log.warning(
                "no pidfd_open on this system: if this process is killed, end vLLM's processes by"
                " hand"
            )

    def warm_up_steps(self, counts: Sequence[int]) -> list[WarmUpStep]:
        """Return one step of a warm-up for each number of tokens in `counts`.

        Each step is one pass of this number of tokens through the model, without KV.
        """
        run = partial(
            self._call_workers,
            _PASS,
            limit_s=_PASS_S,
            failure="vLLM could not run a pass of the warm-up",
        )
        return [WarmUpStep(f"{tokens} tokens", partial(run, tokens)) for tokens in counts]

    @asynccontextmanager
    async def compiling(self) -> AsyncIterator[None]:
        """Count the compilations of kernels within this context, and log their number at its end.

        vLLM itself logs a warning for each compilation. It does not log these warnings within the
        context, where compilations are expected.
        """
        await self._call_workers(_COUNT_COMPILATIONS, True)
        yield
        compiled = await self._call_workers(_COUNT_COMPILATIONS, False)
        log.info(
            "kernels compiled by the warm-up or loaded from the cache, per rank: %s",
            ", ".join(str(count) for count in compiled),
        )

    def prepare(self, request: GenerateRequest, kv_params: KvTransferParams | None) -> VllmCall:
        """See `Library.prepare`."""
        fetched = None
        source = None
        if kv_params is not None:
            fetched = unpack(kv_params)
            source = _KvSource(kv_params, side_channel_of(fetched))
        converted = VllmRequest(request, self.model_limits, fetched)
        call_id = f"{request.request_id}.{next(self._numbers)}"
        return VllmCall(self, request, converted, call_id, source)

    def health(self, waiting_since: float | None) -> str:
        """See `Library.health`."""
        return "vLLM's engine process has died; see its log" if self.llm.errored else ""

    def counts(self, *, is_idle: bool) -> Counts:
        """See `Library.counts`.

        `is_idle` is not needed: the counters of vLLM's last step are right also while no call runs.
        They include the KV that waits for its decode workers.
        """
        return self.last_counts()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` in a task of this library."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """See `Library.aclose`."""
        await self.kv_releaser.aclose()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_ABORT_S)
        # The handler watches the engine process, whose shutdown it would log as a crash.
        if self.llm.output_handler is not None:
            self.llm.output_handler.cancel()


class _KvSource(NamedTuple):
    """Where a decode call fetches KV from."""

    kv_params: KvTransferParams
    address: str  # "host:port"


class VllmCall:
    """One request in AsyncLLM.

    vLLM's output handler passes the outputs on directly, so that no task has to wake up for each
    token.
    """

    def __init__(
        self,
        library: VllmLibrary,
        request: GenerateRequest,
        converted: VllmRequest,
        call_id: str,
        source: _KvSource | None = None,
    ) -> None:
        self._source = source  # None if the call fetches no KV
        self.exports_kv = converted.exports_kv
        self.stop_ids = converted.stop_ids
        self.num_generated = 0
        self.cached_tokens = 0
        self._library = library
        self._converted: VllmRequest | None = converted  # None after it was submitted
        # The seed that was drawn for this prefill call. The decode call must use the same seed.
        # None: no seed was drawn.
        self._drawn_seed = converted.seed if request.sampling.seed is None else None
        self._call_id = call_id
        self._fetches_kv = request.kv_params is not None
        self._is_aborted = False
        self._is_submitted = False
        # The number of alternatives per token; None if no log-probabilities are wanted.
        self._num_alternatives = request.sampling.logprobs
        self._tokens_of_prefill = converted.tokens_of_prefill
        # The log-probabilities of the first output token, from the prefill engine.
        self._first_logprobs: tuple[TokenLogprob, ...] = ()
        if request.kv_params is not None:
            self._first_logprobs = request.kv_params.first_logprobs
        scores_prompt = request.sampling.prompt_logprobs is not None and not self._fetches_kv
        # The request, until the log-probabilities of its prompt are returned; None afterwards, or
        # if the client does not want them.
        self._unscored = request if scores_prompt else None

    async def run(self, receiver: ResultReceiver) -> None:
        """Submit the request. See `LibraryCall.run`."""
        assert self._converted is not None
        if self._source is not None:
            kv_params, address = self._source
            await self._library.guard.check_address(kv_params, address)
        arguments = self._library.bindings.arguments(self._converted)
        self._converted = None
        try:
            collector = await self._library.llm.add_request(self._call_id, **arguments)
        except asyncio.CancelledError:
            # vLLM may already have received the request.
            self._library.start(self._abort(), f"abort-{self._call_id}")
            raise
        except Exception as exc:  # vLLM raises a bare Exception, too
            raise self._rejection(exc) from exc

        def put(output: Any) -> None:
            # If vLLM's engine fails, vLLM passes the exception to all requests.
            if isinstance(output, Exception):
                error = EngineFailed(f"vLLM's engine has died: {output}")
                error.__cause__ = output
                receiver.on_error(error)
            else:
                receiver.on_result(output)

        # AsyncLLM.generate would await this collector in a task per request. Its `put` is called by
        # vLLM's output handler, once per step and request (vllm/v1/engine/output_processor.py of
        # 0.24.0).
        early_output = collector.output  # an output that came before `put` is replaced
        collector.put = put
        self._is_submitted = True
        if early_output is not None:
            put(early_output)
        if self._is_aborted:
            self.abort()

    def _rejection(self, exc: Exception) -> DynamoError:
        """Return the error of a request that vLLM did not accept."""
        if isinstance(exc, self._library.bindings.dead) or self._library.llm.errored:
            return EngineFailed(f"vLLM's engine has died: {exc}")
        if isinstance(exc, (ValueError, TypeError, AssertionError, LookupError)):
            return RequestRejected(f"vLLM rejected the request: {exc}")
        return MigrationFailed(
            f"vLLM did not accept request {self._call_id}: {type(exc).__name__}: {exc}"
        )

    def read(self, result: Any) -> tuple[Chunk, str | None]:
        """See `LibraryCall.read`. Outputs have the new tokens only."""
        output = result.outputs[0]
        self.cached_tokens = int(result.num_cached_tokens or 0)
        tokens = list(output.token_ids)
        logprobs = self._logprobs(tokens, output.logprobs or ())
        # The token of the prefill engine is output before the first token of this engine. If this
        # engine ends the output without a token, the token of the prefill engine is output with the
        # end.
        has_output = bool(tokens) or output.finish_reason in ENDS
        if self.num_generated == 0 and has_output:
            tokens = [*self._tokens_of_prefill, *tokens]
            logprobs = self._with_first(tokens, logprobs)
        self.num_generated += len(tokens)
        scores: tuple[TokenLogprob, ...] = ()
        if self._unscored is not None and result.prompt_logprobs:
            request = self._unscored
            self._unscored = None
            scores = prompt_logprobs(request, result.prompt_logprobs)
        chunk = Chunk(token_ids=token_ids(tokens), logprobs=logprobs, prompt_logprobs=scores)
        return chunk, output.finish_reason

    def _with_first(
        self, tokens: list[int], logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[TokenLogprob, ...]:
        """Return the log-probabilities of all tokens: for the first token those of the prefill
        engine, for the others those of this engine.

        If the two engines do not agree on the first token, return this engine's for all tokens.
        """
        reported = self._first_logprobs
        if self._num_alternatives is None or not reported or not tokens:
            return logprobs
        if reported[0].token_id != tokens[0]:
            return logprobs
        # If this engine has sampled the first token again, `logprobs` begins with this token.
        has_sampled_first_again = not self._tokens_of_prefill
        others = logprobs[1:] if has_sampled_first_again else logprobs
        return (reported[0], *others)

    def _logprobs(self, tokens: list[int], reported: Sequence[Any]) -> tuple[TokenLogprob, ...]:
        if self._num_alternatives is None:
            return ()
        if len(reported) < len(tokens):
            raise RequestRejected(
                "vLLM returned no log-probability for a token; retry without logprobs",
                field="logprobs",
            )
        return tuple(
            token_logprob("vLLM", token, reported[index], self._num_alternatives)
            for index, token in enumerate(tokens)
        )

    def phases(self, result: Any) -> dict[str, float]:
        """See `LibraryCall.phases`.

        The times are those of vLLM's engine process, from its `RequestStateStats`.

        A decode call is queued until its KV has been read, then computes its first token. Only the
        last result also has the parts of the time in the queue.
        """
        times = result.metrics
        if times is None or not 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts:
            return {}
        waited_s = times.scheduled_ts - times.queued_ts
        computed_s = times.first_token_ts - times.scheduled_ts
        if self._fetches_kv:
            parts = read_parts(times.queued_ts, result.kv_transfer_params)
            return {"kv_transfer": waited_s, "first_token": computed_s, **parts}
        return {"queue": waited_s, "prefill": computed_s}

    def export(self, result: Any, chunk: Chunk) -> tuple[Chunk, bytes]:
        """See `LibraryCall.export`."""
        state = pack(
            result.kv_transfer_params, release=self._library.bindings.version, seed=self._drawn_seed
        )
        first = Chunk(token_ids=chunk.token_ids[:1], logprobs=chunk.logprobs[:1])
        return first, state

    def abort(self) -> None:
        """See `LibraryCall.abort`. `run` aborts a call that is still being submitted afterwards."""
        self._is_aborted = True
        if self._is_submitted:
            # In a task, because vLLM's output handler may call this while it handles outputs.
            self._library.start(self._abort(), f"abort-{self._call_id}")

    async def _abort(self) -> None:
        try:
            await self._library.llm.abort(self._call_id)
        except Exception as exc:  # noqa: BLE001 - vLLM raises a bare Exception, too
            log.warning("abort of %s failed: %s", self._call_id, exc)

    def release_kv(self, *, has_expired: bool) -> None:
        """See `LibraryCall.release_kv`."""
        if self._is_submitted:
            self._library.kv_releaser.post(self._call_id, has_expired=has_expired)


def prompt_logprobs(request: GenerateRequest, reported: Sequence[Any]) -> tuple[TokenLogprob, ...]:
    """Convert vLLM's log-probabilities of a prompt. vLLM reports none for the first token."""
    ids = request.token_ids
    alternatives = request.sampling.prompt_logprobs or 0
    first = TokenLogprob(ids[0], math.nan)
    others = [
        token_logprob("vLLM", ids[index], reported[index], alternatives)
        for index in range(1, len(ids))
    ]
    return (first, *others)
