"""An engine's own arguments from a worker's configuration: YAML < flags < override JSON, checked by its schema.

Pure but for reading the YAML. Each engine brings its schema; a flag without a counterpart in it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from dynamo_trtllm.config import layers
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.errors import ConfigError

S = TypeVar("S", bound=BaseModel)

# Every flag that speaks of the engine. One that the chosen engine has no argument for is refused, never ignored.
ENGINE_FLAGS = (
    "max_num_tokens",
    "max_batch_size",
    "max_seq_len",
    "kv_block_size",
    "free_gpu_memory_fraction",
    "tensor_parallel_size",
    "expert_parallel_size",
    "pipeline_parallel_size",
)


def engine_arguments(config: WorkerConfig, schema: type[S], engine: str) -> S:
    """The checked arguments. Raises ConfigError naming the flag, file or key at fault."""
    merged = layered_arguments(config, schema, engine)
    try:
        return schema.model_validate(layers.nested(merged))
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        source = f" ({merged[key].source})" if key in merged else ""
        raise ConfigError(f"{engine} engine argument {key}{source}: {first['msg']}", field=key) from exc


def layered_arguments(config: WorkerConfig, schema: type[BaseModel], engine: str) -> dict[str, layers.Layered]:
    """Every argument that was set, with the place that won."""
    given = {name: value for name in ENGINE_FLAGS if (value := getattr(config, name)) is not None}
    flags = {name: value for name, value in given.items() if name in schema.model_fields or not _is_one(name, value)}
    _refuse_foreign(flags, schema, engine)
    yaml = layers.read_yaml(layers.located(config.extra_engine_args)) if config.extra_engine_args else {}
    override = config.override_engine_args or {}
    layers.check_keys(yaml, schema.model_fields, f"--extra-engine-args {config.extra_engine_args}")
    layers.check_keys(override, schema.model_fields, layers.OVERRIDE_SOURCE)
    return layers.merge_engine_args(yaml, flags, override)


def _is_one(name: str, value: float) -> bool:
    """One device is what every engine runs on."""
    return name.endswith("_parallel_size") and value == 1


def _refuse_foreign(flags: Iterable[str], schema: type[BaseModel], engine: str) -> None:
    for name in flags:
        if name not in schema.model_fields:
            why = "runs on one device" if name.endswith("_parallel_size") else "has no such setting"
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: the {engine} engine {why}; leave it out", field=name)
