"""The engine a configuration asks for. The only file that knows all engines; vendors are imported when chosen."""

from __future__ import annotations

import importlib.util

from dynamo_trtllm.config.base import EngineName
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engine.base import Engine
from dynamo_trtllm.errors import ConfigError


def create_engine(config: WorkerConfig, *, instance_id: int) -> Engine:
    """Not started. Raises ConfigError for an engine that is not here, or arguments it can't take."""
    match config.engine or _default():
        case "trtllm":
            from dynamo_trtllm.engine.trtllm.engine import TrtllmEngine

            return TrtllmEngine(config, instance_id=instance_id)
        case "vllm":
            from dynamo_trtllm.engine.vllm.engine import VllmEngine

            return VllmEngine(config, instance_id=instance_id)
        case "torch":
            try:
                from dynamo_trtllm.engine.torch.engine import TorchEngine
            except ModuleNotFoundError as exc:
                raise ConfigError(
                    f"the torch engine needs {exc.name}; pip install 'dynamo_trtllm[torch]'", field="engine"
                ) from exc
            return TorchEngine(config, instance_id=instance_id)
        case "mock":
            from dynamo_trtllm.engine.mock.engine import MockEngine

            return MockEngine(config, instance_id=instance_id)


def _default() -> EngineName:
    """TensorRT-LLM where it is installed; it is not imported here. Raises ConfigError elsewhere."""
    if importlib.util.find_spec("tensorrt_llm") is not None:
        return "trtllm"
    raise ConfigError(
        "no --engine is named and TensorRT-LLM, which is then meant, is not installed: pip install tensorrt-llm on a "
        "machine with NVIDIA GPUs, or choose --engine vllm, --engine torch (transformers on CPU or GPU) or --engine "
        "mock (no weights)",
        field="engine",
    )
