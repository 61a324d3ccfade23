"""`LLM` and `RequestOutput`: the PyTorch flavour, which is what the public name means."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Sequence
from typing import Any

from tensorrt_llm.executor.executor import GenerationExecutor, Submission
from tensorrt_llm.executor.result import GenerationResult, IterationResult
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.llmapi import llm_utils
from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.standin import traps
from tensorrt_llm.standin.core import Core
from tensorrt_llm.standin.kv_transfer import python_transceiver
from tensorrt_llm.standin.model_defaults import apply_model_defaults
from tensorrt_llm.standin.release import LINE, RELEASE, VERSION, checked_arguments

log = logging.getLogger(__name__)


class RequestOutput(GenerationResult):
    """What `generate_async` returns."""


def _signature(method: str) -> inspect.Signature:
    fields = RELEASE.fields(f"LLM.{method}").values()
    of_kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter("self", of_kind)]
        + [
            inspect.Parameter(
                f.name, of_kind, default=inspect.Parameter.empty if f.required else f.default
            )
            for f in fields
        ]
    )


_GENERATE_ASYNC = _signature("generate_async")


class LLM:
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Blocks until weights are loaded.

        ValueError for a key that the played release lacks, before any work.
        """
        for name in ("executor_cls", "_mpi_session"):
            kwargs.pop(name, None)
        named = {
            "model": model,
            "skip_tokenizer_init": skip_tokenizer_init,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
        }
        self.args = args = checked_arguments("TorchLlmArgs", named | kwargs)
        for name in llm_utils.CLASSES.keys() & args.keys():
            args[name] = llm_utils.checked(name, args[name])
        if args["max_num_tokens"] is None:
            args["max_num_tokens"] = 8192
        log.warning(
            "STAND-IN plays TensorRT-LLM %s: no NVIDIA code runs; the torch engine computes",
            VERSION,
        )
        if traps.is_on("start_fails"):
            raise RuntimeError("Executor worker returned error")
        try:
            apply_model_defaults(args, named | kwargs)
            transceiver = python_transceiver(args)  # with `auto`, every model prefers it
        except (ValueError, RuntimeError) as exc:
            raise RuntimeError("Executor worker returned error") from exc
        self._core = Core(args)
        self._executor: GenerationExecutor | None = GenerationExecutor(
            self._core, args, transceiver
        )
        self._iterations: dict[str, IterationResult] = {}

    def generate_async(self, *args: Any, **kwargs: Any) -> RequestOutput:
        """Returns at once."""
        for row in self._iterations.values():
            row.is_done = False
        given = _GENERATE_ASYNC.bind(self, *args, **kwargs)
        given.apply_defaults()
        call = given.arguments
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        prompt = _prompt_ids(call["inputs"])
        params = call["disaggregated_params"]
        sampling = self._prepared(call["sampling_params"] or SamplingParams(), params)
        self._check(prompt, params)
        if traps.is_on("refused_at_call"):
            raise RequestError("a test made the stand-in refuse this request")
        if traps.is_on("unsupported_at_call"):
            raise NotImplementedError("a test made the stand-in lack support of this request")
        submission = Submission(
            prompt_token_ids=prompt,
            sampling=sampling,
            streaming=call["streaming"],
            disaggregated_params=params,
            cache_salt=call.get("cache_salt"),
            scheduling=call.get("scheduling_params"),
            conversation=call.get("conversation_params"),
            priority=self._priority(call.get("priority", 0.5)),
        )
        result = RequestOutput(self._executor, self._executor.next_id(), prompt, call["streaming"])
        self._executor.submit(submission, result)
        return result

    generate_async.__signature__ = _GENERATE_ASYNC  # type: ignore[attr-defined]

    def _prepared(self, sampling: Any, params: Any) -> Any:
        """On the caller's object, as the real one does."""
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"Unsupported sampling_params type {type(sampling)}")
        if sampling.end_id is None:
            if self.args["skip_tokenizer_init"]:
                raise ValueError("tokenizer is required to reset end_id if it is None, or you can explicitly specify "
                                 "the end_id for sampling_params")  # fmt: skip
            if not traps.is_on("setup_changes_caller"):
                sampling = _copy(sampling)
            sampling._setup(self._core.info.eos_token_ids)
        if params is not None and params.request_type == "context_only":
            if not traps.is_on("forces_max_tokens"):
                sampling = _copy(sampling)
            sampling.max_tokens = 1
        sampling._get_stop_words()
        if self.args.get("return_perf_metrics"):
            sampling.return_perf_metrics = True
        return sampling

    def _priority(self, priority: float) -> int:
        """As the torch engine counts; 0 unless the executor's queue is in the order of
        priorities.
        """
        if not 0.0 <= priority <= 1.0:
            raise ValueError(f"priority must be in [0.0, 1.0], got {priority}")
        policy = (self.args["scheduler_config"] or {}).get("waiting_queue_policy")
        return round((0.5 - priority) * (1 << 22)) if policy == "priority" else 0

    def _check(self, prompt: Sequence[int], params: Any) -> None:
        is_decode = params is not None and params.request_type == "generation_only"
        limit = self.args["max_num_tokens"]
        if len(prompt) > limit and not self.args["enable_chunked_prefill"] and not is_decode:
            kind = RequestError if LINE >= (1, 2) else ValueError
            raise kind(f"The sum of prompt length ({len(prompt)}) and query length (0) should not exceed "
                       f"max_num_tokens ({limit})")  # fmt: skip

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Blocks up to the time-out when there is nothing new."""
        return _read(self._running_executor().get_stats, timeout or 0)

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        return self._iterated("stats", self._running_executor().get_stats, timeout)

    if LINE >= (1, 4):

        def get_kv_cache_capacity(self) -> dict[str, int]:
            """Of one rank; a remote call."""
            executor = self._running_executor()
            blocks = executor.core.stats().kv_blocks_total
            block_tokens = executor.core.info.layout.block_tokens
            return {
                "maxNumBlocks": blocks,
                "tokensPerBlock": block_tokens,
                "maxNumTokens": blocks * block_tokens,
            }

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Blocks up to the time-out when there is nothing new."""
        return _read(self._running_executor().kv_events.take, timeout or 0)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        return self._iterated("kv_events", self._running_executor().kv_events.take, timeout)

    def _iterated(self, name: str, get: Any, timeout: float | None) -> IterationResult:
        iterated = self._iterations.setdefault(name, IterationResult(get))
        iterated.timeout = timeout or 0
        return iterated

    def _running_executor(self) -> GenerationExecutor:
        if self._executor is None:
            raise RuntimeError("LLM is shutting down")
        return self._executor

    def _collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[None]:
        """On every rank: `sleep` releases the memory of these tags, and `wakeup` restores it."""
        if self._executor is None:
            raise RuntimeError("LLM is shutting down")
        if self.args["sleep_config"] is None:
            raise ValueError(
                "Sleep feature is not enabled, please set sleep_config in the LLM arguments"
            )
        self._executor.change_memory(method, {ExecutorMemoryType(tag) for tag in args[0]})
        return [None] * self.args["tensor_parallel_size"]

    def _check_health(self) -> bool:
        """What trtllm-serve's /health asks."""
        return self._executor is not None and not self._executor.is_shutdown()

    def shutdown(self) -> None:
        """Idempotent. Blocks; requests that run fail."""
        executor = self._executor
        self._executor = None
        if executor is None:
            return
        executor.shutdown()
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def _read(take: Any, timeout: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = take(timeout)
    if traps.is_on("sync_reads_lose"):
        while take(timeout):
            pass
        json.loads(None)  # type: ignore[arg-type]
    return rows


def _copy(sampling: Any) -> Any:
    return copy.copy(sampling)


def _prompt_ids(inputs: Any) -> list[int]:
    if isinstance(inputs, dict):
        inputs = inputs.get("prompt_token_ids")
    if not isinstance(inputs, list) or not all(type(token) is int for token in inputs):
        raise TypeError(
            f"The inputs must be token ids: the stand-in has no tokenizer; got {type(inputs)}"
        )
    return inputs
