"""The engine a configuration asks for. The only file that knows all engines; vendors are imported when chosen."""

from __future__ import annotations

import importlib.util

from dynamo_trtllm.config.base import EngineName
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.base import Engine
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
