"""Choose engine, devices and workers for one model on one machine.

The functions are pure: facts in, choice out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_trtllm.config.commands import ServeConfig
from dynamo_trtllm.config.engine_names import BUILT_IN
from dynamo_trtllm.engines.gpu import GpuMemory
from dynamo_trtllm.protocol.counted import counted, counted_are
from dynamo_trtllm.protocol.errors import ConfigError, install_hint
from dynamo_trtllm.protocol.messages import Role

_GIB = 1 << 30
# The part of the memory that weights may take. The rest is for KV and activations.
_MAX_WEIGHT_FRACTION = 0.8
# The part of a GPU's memory that has to be free. A GPU with less free memory is in use.
_MIN_FREE_FRACTION = 0.8
_BY_PREFERENCE: tuple[str, ...] = ("trtllm", "vllm", "torch")
# The least memory of a worker's process without weights. With the mock engine it takes 36 MB.
_WORKER_BYTES = 32 << 20
_FOREIGN = "engines of other packages may transfer no KV; see --prefill and --decode"
_GPU_READY_TIMEOUT_S = 3600.0  # loading takes 15 to 30 minutes from slow storage
_CPU_READY_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What this machine has."""

    gpus: Sequence[GpuMemory]
    no_gpu_reason: str  # empty if there are GPUs
    cpus: int  # CPUs that this process may use
    memory_bytes: int  # memory of the host that is available now
    engines: frozenset[str]  # the engines that are installed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the files of a model say."""

    path: str  # value of --model-path
    name: str  # name that clients send
    weight_bytes: int | None  # size of the stored weights; None if it is not known
    # Number of weights, for the torch engine: it converts quantized weights before it computes.
    torch_values: int | None
    num_heads: int | None  # attention heads, of which each GPU gets an equal share
    is_gguf: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The chosen deployment, and a reason for each choice."""

    engine: str
    workers: dict[Role, int]  # number of workers by role
    tensor_parallel_size: int = 1
    gpus: Sequence[int] = ()  # numbers of the GPUs of all workers, in their order; (): CPU
    threads: int = 1  # threads of a worker on the CPU
    reasons: dict[str, str] = field(default_factory=dict)  # reasons by subject


def reads_model(engine: str) -> bool:
    """Return whether a built-in engine reads the files of its model.

    False for engines of other packages: what they read is known only once they are imported.
    """
    return engine in BUILT_IN and BUILT_IN[engine].traits.reads_model


def _has_weights(engine: str) -> bool:
    """Return whether an engine loads weights, or may do so because it is of another package."""
    return reads_model(engine) or engine not in BUILT_IN


def _title(engine: str) -> str:
    return BUILT_IN[engine].title if engine in BUILT_IN else engine


def choose(machine: MachineFacts, model: ModelFacts, options: ServeConfig) -> Topology:
    """Choose how to serve a model.

    Raises:
        ConfigError: the model does not fit, or the options can't be fulfilled.
    """
    engine, why = _engine(machine, model, options)
    _check_elastic(engine, options)
    reasons = {
        "model": f"{model.name}{_size(model.weight_bytes)}",
        "engine": f"{_title(engine)}: {why}",
    }
    if not machine.gpus or not _has_weights(engine):
        return _on_cpu(engine, machine, model, options, reasons)
    return _on_gpus(engine, machine, model, options, reasons)


def _check_elastic(engine: str, options: ServeConfig) -> None:
    """Raise ConfigError if elastic workers are requested of an engine that can't run any.

    Engines of other packages say so when a worker starts.
    """
    obstacle = BUILT_IN[engine].elastic_obstacle if engine in BUILT_IN else ""
    if options.elastic is not None and obstacle:
        raise ConfigError(
            f"--elastic: the {engine} engine can't run an elastic worker: {obstacle}; use"
            " --prefill and --decode, or another --engine"
        )


def _engine(machine: MachineFacts, model: ModelFacts, options: ServeConfig) -> tuple[str, str]:
    """Return the engine and the reason for it."""
    if options.engine is not None:
        return options.engine, "given with --engine"
    why_torch = ""  # why only torch is possible; "": other engines are possible, too
    if not machine.gpus:
        why_torch = f"no NVIDIA GPU was found ({machine.no_gpu_reason}), and it runs on CPUs"
    elif model.is_gguf:
        why_torch = "it alone loads GGUF files"
    possible: Sequence[str] = ("torch",) if why_torch else _BY_PREFERENCE
    missing = []
    for engine in possible:
        if engine not in machine.engines:
            missing.append(_title(engine))
            continue
        if why_torch:
            return engine, why_torch
        if missing:
            return engine, f"{' and '.join(missing)} not installed"
        return engine, "installed"
    names = " or ".join(_title(engine) for engine in possible)
    raise ConfigError(f"no engine for this machine is installed ({names}); {install_hint('torch')}")


def _on_cpu(
    engine: str,
    machine: MachineFacts,
    model: ModelFacts,
    options: ServeConfig,
    reasons: dict[str, str],
) -> Topology:
    """Choose workers that run on the CPU. Add to the reasons."""
    if options.tensor_parallel_size not in (None, 1):
        raise ConfigError(
            f"--tensor-parallel-size {options.tensor_parallel_size} needs GPUs, but these workers"
            " run on the CPU; remove it"
        )
    limit = int(machine.memory_bytes * _MAX_WEIGHT_FRACTION)
    requested = _requested_workers(options)
    if requested is None and engine not in BUILT_IN:
        workers = {Role.AGGREGATED: 1}
        reasons["topology"] = f"{_described(workers)}: {_FOREIGN}"
    elif requested is None:
        workers = {Role.PREFILL: 1, Role.DECODE: 1}
        reasons["topology"] = f"{_described(workers)}, the smallest disaggregated deployment"
    else:
        workers = requested
        reasons["topology"] = f"{_described(workers)}, as given"
    needed = _WORKER_BYTES * sum(workers.values())
    if needed > limit:
        raise ConfigError(
            f"{_described(workers)} need at least {_gib(needed)} of memory without weights, but "
            f"{_gib(machine.memory_bytes)} are available; ask for fewer with --prefill and --decode"
        )
    worker_bytes = _bytes_in_memory(engine, model, on_gpu=False)
    if worker_bytes is None or not _has_weights(engine):
        worker_bytes = 0
    if requested is None and worker_bytes * sum(workers.values()) > limit:
        workers = {Role.AGGREGATED: 1}
        reasons["topology"] = f"{_described(workers)}: the memory does not hold the weights twice"
    needed = worker_bytes * sum(workers.values())
    if needed > limit:
        raise ConfigError(
            f"{_described(workers)} of {model.name} on the CPU would hold {_gib(needed)} of"
            f" weights, but {_gib(machine.memory_bytes)} of memory are available, of which weights"
            f" may take {_MAX_WEIGHT_FRACTION:.0%}; use a smaller model, or a machine with GPUs"
        )
    threads = max(1, machine.cpus // sum(workers.values()))
    reasons["devices"] = f"CPU, {threads} of {machine.cpus} cores per worker"
    return Topology(engine=engine, workers=workers, threads=threads, reasons=reasons)


def _on_gpus(
    engine: str,
    machine: MachineFacts,
    model: ModelFacts,
    options: ServeConfig,
    reasons: dict[str, str],
) -> Topology:
    """Choose workers that run on free GPUs. Add to the reasons."""
    free: list[GpuMemory] = []
    busy: list[str] = []
    for gpu in machine.gpus:
        if gpu.free_bytes >= _MIN_FREE_FRACTION * gpu.total_bytes:
            free.append(gpu)
        else:
            busy.append(str(gpu.number))
    if not free:
        raise ConfigError(
            f"every GPU is in use: {', '.join(map(_memory, machine.gpus))}; stop the processes that"
            " nvidia-smi lists"
        )
    size, why = _tensor_parallel_size(engine, free, model, options)
    requested = _requested_workers(options)
    if requested is not None:
        workers = requested
        reasons["topology"] = f"{_described(workers)}, as given"
    elif engine not in BUILT_IN:
        workers = {Role.AGGREGATED: 1}
        reasons["topology"] = f"{_described(workers)}: {_FOREIGN}"
    elif len(free) >= 2 * size:
        workers = {Role.PREFILL: 1, Role.DECODE: 1}
        reasons["topology"] = f"{_described(workers)}: the free GPUs suffice for both"
    else:
        workers = {Role.AGGREGATED: 1}
        reasons["topology"] = (
            f"{_described(workers)}: prefill and decode workers would need {2 * size} free GPUs"
        )
    needed = size * sum(workers.values())
    if needed > len(free):
        in_use = f" (in use: {', '.join(busy)})" if busy else ""
        raise ConfigError(
            f"{_described(workers)} with {counted(size, 'GPU')} each need"
            f" {counted(needed, 'GPU')}, but {counted_are(len(free), 'GPU')} free{in_use}; ask for"
            " fewer workers"
        )
    chosen = [gpu.number for gpu in free[:needed]]
    num_unused = len(free) - needed
    reasons["devices"] = f"GPU {', '.join(map(str, chosen))} ({free[0].name}); {why}"
    if busy:
        reasons["devices"] += f"; in use by others: {', '.join(busy)}"
    if num_unused:
        reasons["devices"] += f"; {num_unused} more free, which --prefill and --decode can use"
    return Topology(
        engine=engine, workers=workers, tensor_parallel_size=size, gpus=chosen, reasons=reasons
    )


def _tensor_parallel_size(
    engine: str, gpus: Sequence[GpuMemory], model: ModelFacts, options: ServeConfig
) -> tuple[int, str]:
    """Return the number of GPUs per worker and the reason for it."""
    if engine == "torch" and options.tensor_parallel_size not in (None, 1):
        raise ConfigError(
            "the torch engine runs on one GPU; remove --tensor-parallel-size, or use another"
            " --engine"
        )
    if options.tensor_parallel_size is not None:
        return options.tensor_parallel_size, "as many per worker as given"
    weight_bytes = _bytes_in_memory(engine, model, on_gpu=True)
    if weight_bytes is None:
        return 1, "one per worker: the size of the weights is not known"
    limit = min(gpu.total_bytes for gpu in gpus) * _MAX_WEIGHT_FRACTION
    # The least power of two, because it divides the attention heads of most models.
    size = 1
    while weight_bytes / size > limit:
        size *= 2
    max_size = 1 if engine == "torch" else len(gpus)
    divides_heads = model.num_heads is None or model.num_heads % size == 0
    if size > max_size or not divides_heads:
        advice = "use vLLM or TensorRT-LLM, or " if engine == "torch" else ""
        raise ConfigError(
            f"{model.name} has {_gib(weight_bytes)} of weights with {_title(engine)}, but GPUs of"
            f" {_memory(gpus[0])} hold {_gib(limit)} each, and there are {len(gpus)};"
            f" {advice}choose a smaller model"
        )
    enough = "fit one GPU" if size == 1 else f"need {size} GPUs"
    return size, f"{_gib(weight_bytes)} of weights {enough} with {_gib(limit)} for weights each"


def _bytes_in_memory(engine: str, model: ModelFacts, *, on_gpu: bool) -> int | None:
    """Return the bytes of the loaded weights, or None if the number is not known."""
    if engine != "torch":
        return model.weight_bytes
    if model.torch_values is None:
        return None
    value_bytes = 2 if on_gpu else 4  # bfloat16, float32
    return model.torch_values * value_bytes


def _requested_workers(options: ServeConfig) -> dict[Role, int] | None:
    """Return the number of workers by role that the options ask for; None if they do not say."""
    if options.elastic is not None:
        others = (options.prefill, options.decode, options.replicas)
        if any(count is not None for count in others):
            raise ConfigError(
                "--elastic asks for elastic workers, --prefill, --decode and --replicas for others;"
                " remove --elastic, or these"
            )
        return {Role.ELASTIC: options.elastic}
    if options.prefill is None and options.decode is None:
        return None if options.replicas is None else {Role.AGGREGATED: options.replicas}
    if options.replicas is not None:
        raise ConfigError(
            "--replicas asks for aggregated workers, --prefill and --decode for others; remove"
            " --replicas, or both of these"
        )
    return {
        Role.PREFILL: 1 if options.prefill is None else options.prefill,
        Role.DECODE: 1 if options.decode is None else options.decode,
    }


def deployment_data(
    chosen: Topology,
    model: ModelFacts,
    options: ServeConfig,
    worker_flags: dict[str, Any],
    frontend_flags: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of a deployment file.

    Args:
        chosen: return value of `choose`.
        model: the model.
        options: settings of the command.
        worker_flags: more flags of every worker, by field name.
        frontend_flags: more flags of the frontend, by field name.
    """
    flags: dict[str, Any] = {"model-path": model.path, "engine": chosen.engine}
    if "served_model_name" not in worker_flags:
        flags["served-model-name"] = model.name
    if chosen.tensor_parallel_size > 1:
        flags["tensor-parallel-size"] = chosen.tensor_parallel_size
    for field_name, value in worker_flags.items():
        flags[field_name.replace("_", "-")] = value
    if chosen.engine == "torch" and not chosen.gpus and chosen.threads > 1:
        given = flags.get("override-engine-args") or {}
        flags["override-engine-args"] = {"num_threads": chosen.threads, **given}
    workers = []
    unassigned = list(chosen.gpus)
    for role, count in chosen.workers.items():
        num_gpus = count * chosen.tensor_parallel_size
        gpus = unassigned[:num_gpus]
        unassigned = unassigned[num_gpus:]
        worker: dict[str, Any] = {
            "name": "worker" if role is Role.AGGREGATED else role.value,
            "disaggregation_mode": role.value,
            "devices": gpus or "cpu",
        }
        if count > 1:
            worker["count"] = count
        if gpus:
            # CUDA then numbers the GPUs as nvidia-smi does.
            worker["env"] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        worker["flags"] = dict(flags)
        workers.append(worker)
    frontend: dict[str, Any] = {"http-port": options.port}
    if options.host is not None:
        frontend["http-host"] = options.host
    for field_name, value in frontend_flags.items():
        frontend[field_name.replace("_", "-")] = value
    return {
        "namespace": options.namespace,
        "services": {"etcd": "start", "nats": "start"},
        "frontend": frontend,
        "workers": workers,
        "ready_timeout_s": _GPU_READY_TIMEOUT_S if chosen.gpus else _CPU_READY_TIMEOUT_S,
    }


def _described(workers: dict[Role, int]) -> str:
    names = {Role.AGGREGATED: "aggregated"}
    parts = [f"{count} {names.get(role, role.value)}" for role, count in workers.items()]
    noun = "workers" if max(workers.values()) > 1 else "worker"
    return f"{' and '.join(parts)} {noun}"


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f", {_gib(num_bytes)} of weights"


def _memory(gpu: GpuMemory) -> str:
    return f"{_gib(gpu.total_bytes)} ({_gib(gpu.free_bytes)} free)"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
