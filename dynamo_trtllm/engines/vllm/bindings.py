"""Import vLLM and bind the names that the engine uses; build the engine, and explain failed starts.

Importing this module does not import vLLM. `VllmBindings` imports vLLM, so the environment must be
set before a `VllmBindings` is created.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.external.library import construct
from dynamo_trtllm.engines.manifests import ApiManifest
from dynamo_trtllm.engines.vllm.releases import PACKAGE
from dynamo_trtllm.engines.vllm.requests import VllmRequest
from dynamo_trtllm.protocol.errors import ConfigError, EngineFailed

# The classes of errors that vLLM raises for invalid arguments and for a failed start. They have no
# common base class.
_VLLM_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    EOFError,
)
_GIB = 1 << 30
_SHARE = "gpu_memory_utilization"
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

FreeAndTotal = Sequence[tuple[int, int]]  # free and total bytes of each visible GPU
OnStats = Callable[[int, Any], None]  # index of the engine's data-parallel rank, its SchedulerStats


def explain_oom(
    values: Mapping[str, Any], release: ApiManifest, before: FreeAndTotal, after: FreeAndTotal
) -> str | None:
    """Return why an engine did not start, if a GPU had too little free memory.

    Args:
        values: the engine's arguments.
        release: the API of the installed release, for the argument's default.
        before: memory of each visible GPU before the failed start.
        after: memory of each visible GPU after the failed start.

    Returns:
        The reason, or None if each GPU of the engine had enough free memory before or after the
        start. Then the start has failed for another reason.
    """
    share = values.get(_SHARE, schema.default(release, _SHARE, values))
    if not isinstance(share, (int, float)):
        return None
    ranks = math.prod(int(values.get(name) or 1) for name in _RANKS)
    gpus = zip(before[:ranks], after[:ranks], strict=False)
    for number, (memory_before, memory_after) in enumerate(gpus):
        free_before, total = memory_before
        free_after, _ = memory_after
        free = max(free_before, free_after)
        if free >= share * total:
            continue
        fits = math.floor(100 * free / total) / 100
        fix = ""
        if fits > 0:
            fix = f", or set --free-gpu-memory-fraction {fits:g}, if weights and KV fit into that"
        return (
            f"GPU {number} has {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, but {_SHARE}"
            f" {share:g} needs {share * total / _GIB:.1f} GiB: another process uses the rest."
            " If nvidia-smi lists none, a decode worker that read KV from a dead prefill"
            " worker over CUDA IPC still maps that worker's memory"
            " (https://github.com/openucx/ucx/issues/11753): restart the decode workers of"
            f" this machine{fix}"
        )
    return None


class VllmBindings:
    """The bound classes and functions of vLLM.

    Their type is Any, because vLLM is not a dependency of type checks.
    """

    def __init__(self, release: ApiManifest) -> None:
        """Import vLLM, which takes many seconds.

        Args:
            release: the API of the installed release.

        Raises:
            ConfigError: vLLM can't be imported or lacks a name.
        """
        find = PACKAGE.find
        self._release = release
        self._logger_base = find("PrometheusStatLogger", "vllm.v1.metrics.loggers")
        self.version, _, _ = str(PACKAGE.load().__version__).partition("+")
        self._config = PACKAGE.load("vllm.config")  # the module of configuration classes
        self.engine_args = find("AsyncEngineArgs", "vllm.engine.arg_utils")
        self.async_llm = find("AsyncLLM", "vllm.v1.engine.async_llm")
        # vLLM's defaults depend on the usage context. For servers on H100 and H200 they are 8,192
        # tokens in a step and 1,024 requests, and without a usage context 2,048 and 128
        # (`EngineArgs.get_batch_defaults`, 0.24 to 0.32).
        self._usage = find("UsageContext", "vllm.usage.usage_lib").OPENAI_API_SERVER
        self._sampling_params = find("SamplingParams", "vllm.sampling_params")
        self._structured_outputs = find("StructuredOutputsParams", "vllm.sampling_params")
        self._delta = find("RequestOutputKind", "vllm.sampling_params").DELTA
        self.dead: type[Exception] = find("EngineDeadError", "vllm.v1.engine.exceptions")

    def build(self, values: Mapping[str, Any], on_stats: OnStats) -> Any:
        """Build and start an AsyncLLM. Blocks until the model is loaded.

        Raises:
            ConfigError: vLLM rejects the arguments.
            EngineFailed: vLLM could not be started.
        """
        arguments = self._typed(values)
        logger = self._logger(on_stats)
        try:
            config = self.engine_args(**arguments).create_engine_config(self._usage)
        except _VLLM_ERRORS as exc:
            raise self._rejected(exc) from exc
        before = gpu.free_and_total_bytes()
        try:
            return self.async_llm.from_vllm_config(
                config, stat_loggers=[logger], disable_log_stats=True, enable_log_requests=False
            )
        except _VLLM_ERRORS as exc:
            # The reason is in the log of vLLM's engine process, and the exception here says only
            # "initialization failed". But a lack of GPU memory can be found out here.
            lack = explain_oom(values, self._release, before, gpu.free_and_total_bytes())
            if lack is not None:
                raise EngineFailed(f"vLLM could not be started: {lack}") from exc
            raise EngineFailed(f"vLLM could not be started: {_short(exc)}; see its log") from exc

    def arguments(self, call: VllmRequest) -> dict[str, Any]:
        """Return the keyword arguments of `AsyncLLM.add_request`.

        Raises:
            RequestRejected: vLLM's classes reject a value.
        """
        sampling = dict(call.sampling)
        if call.guided is not None:
            sampling["structured_outputs"] = construct(
                PACKAGE.library, self._structured_outputs, call.guided
            )
        sampling["output_kind"] = self._delta
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": call.prompt}
        if call.cache_salt is not None:
            prompt["cache_salt"] = call.cache_salt
        params = construct(PACKAGE.library, self._sampling_params, sampling)
        arguments = {"prompt": prompt, "params": params}
        if call.priority:
            arguments["priority"] = call.priority
        return arguments

    def _typed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert nested mappings to vLLM's configuration classes.

        Raises:
            ConfigError: vLLM rejects a value.
        """
        arguments = {}
        for name, value in values.items():
            arguments[name] = value
            field = schema.find(self._release, name).field
            if field is None or not isinstance(value, Mapping):
                continue
            classes = schema.owners(self._release, field)
            if not classes:
                continue
            try:
                arguments[name] = getattr(self._config, classes[0])(**value)
            except _VLLM_ERRORS as exc:
                raise self._rejected(exc) from exc
        return arguments

    def _rejected(self, exc: Exception) -> ConfigError:
        return ConfigError(f"vLLM {self.version} rejects the engine arguments: {_short(exc)}")

    def _logger(self, on_stats: OnStats) -> Any:
        """Return a stat logger class that replaces vLLM's Prometheus logger.

        With vLLM's logger, everything would be exported twice.
        """

        class Statistics(self._logger_base):  # type: ignore[misc,name-defined]
            def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
                """Do nothing; no Prometheus metrics are registered."""

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                if scheduler_stats is not None:
                    on_stats(engine_idx, scheduler_stats)

            def log_engine_initialized(self) -> None:
                """Do nothing; the engine logs it."""

            def record_sleep_state(self, is_awake: int, level: int) -> None:
                """Do nothing; sleep mode is not used."""

        return Statistics


def kv_transfer_group() -> Any:
    """Return the KV connector of this vLLM worker process, or None if it has none."""
    module = PACKAGE.load("vllm.distributed.kv_transfer")
    if not module.has_kv_transfer_group():
        return None
    return module.get_kv_transfer_group()


def _short(exc: BaseException) -> str:
    """Return the first 400 characters of an error text in one line, or the name of its class."""
    line = " ".join(str(exc).split())
    return line[:400] or type(exc).__name__
