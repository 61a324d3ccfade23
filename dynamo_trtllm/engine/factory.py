"""The engine a configuration asks for. The only file that knows all engines; vendors are imported when chosen."""

from __future__ import annotations

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engine.base import Engine
from dynamo_trtllm.errors import ConfigError


def create_engine(config: WorkerConfig, *, instance_id: int) -> Engine:
    """Not started. Raises ConfigError for an engine that is not here, or arguments it can't take."""
    match config.engine:
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
        case _:
            raise ConfigError(
                "the trtllm engine, which is meant without --engine, is not built yet; "
                "choose --engine torch (transformers on CPU or GPU) or --engine mock (no weights)",
                field="engine",
            )
