"""Merge an engine's arguments from a worker's configuration, check them by its schema, and remember their sources.

Later sources override earlier ones: YAML < environment < flag < override JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from dynamo_trtllm.config import layers
from dynamo_trtllm.config.base import CODE_SOURCE
from dynamo_trtllm.config.layers import Merged, Source, SourcedValue
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.errors import ConfigError

_log = logging.getLogger(__name__)

S = TypeVar("S", bound=BaseModel)

# Every flag that sets an engine argument. A flag that the chosen engine has no argument for is rejected.
ENGINE_FLAGS = (
    "load_format",
    "max_num_tokens",
    "max_batch_size",
    "max_seq_len",
    "kv_block_size",
    "free_gpu_memory_fraction",
    "tensor_parallel_size",
    "expert_parallel_size",
    "pipeline_parallel_size",
)


# Former names of arguments, which are accepted until the next release.
_RENAMED = {"carrier": "transfer_backend"}


class Described(NamedTuple):
    """An engine's arguments as `--print-config` prints them."""

    title: str  # the engine and its release
    given: Mapping[str, SourcedValue]  # arguments that a source set
    every: Mapping[str, SourcedValue]  # all arguments, with defaults
    notes: tuple[str, ...]


def engine_arguments(config: WorkerConfig, schema: type[S], engine: str) -> S:
    """Return the merged arguments, checked by the schema, and log the notes of the merge.

    Args:
        config: settings of the worker.
        schema: pydantic model of the engine's arguments.
        engine: value of `--engine`, for messages.

    Raises:
        ConfigError: names the flag, file or key at fault.
    """
    merged = _merged(config, schema, engine)
    for note in merged.notes:
        _log.info("%s", note)
    return _checked(merged, schema, engine)


def described_arguments(config: WorkerConfig, schema: type[BaseModel], engine: str) -> Described:
    """Return the same arguments as `engine_arguments`, with the source of each.

    Raises:
        ConfigError: names the flag, file or key at fault.
    """
    merged = _merged(config, schema, engine)
    checked = _checked(merged, schema, engine)
    every = {
        name: merged.leaves.get(name, SourcedValue(getattr(checked, name), f"default ({engine})"))
        for name in schema.model_fields
    }
    return Described(f"the {engine} engine", merged.leaves, every, tuple(merged.notes))


def file_layer(config: WorkerConfig) -> Source:
    """Return the arguments in the file of `--extra-engine-args`; an empty source without the flag.

    Raises:
        ConfigError: the file is missing or is not a YAML mapping.
    """
    path = config.extra_engine_args
    return Source(layers.read_yaml(layers.find_file(path)), f"YAML {path}") if path else Source({}, "YAML")


def flag_layers(config: WorkerConfig, names: Mapping[str, str]) -> list[Source]:
    """Return one source per setting that was given, environment variables before flags.

    Args:
        config: settings of the worker.
        names: maps a field of `config` to the dotted name of the engine argument.
    """
    given = [
        Source(_nest(key, value), config.source_of(field))
        for field, key in names.items()
        if (value := getattr(config, field)) is not None
    ]
    return sorted(given, key=lambda layer: not layer.source.startswith("environment "))


def override_layer(config: WorkerConfig) -> Source:
    """Return the arguments of `--override-engine-args`."""
    return Source(config.override_engine_args or {}, layers.OVERRIDE_SOURCE)


def _nest(key: str, value: Any) -> dict[str, Any]:
    return layers.nested({key: SourcedValue(value, "")})


def _merged(config: WorkerConfig, schema: type[BaseModel], engine: str) -> Merged:
    given = {name: value for name in ENGINE_FLAGS if (value := getattr(config, name)) is not None}
    names = [name for name, value in given.items() if name in schema.model_fields or not _is_one(name, value)]
    for name in names:
        _reject_foreign(config, name, schema, engine)
    if config.kernels_profile is not None:
        _reject_foreign(config, "kernels_profile", schema, engine)
    yaml, override = (_renamed(layer, schema) for layer in (file_layer(config), override_layer(config)))
    layers.check_keys(yaml.values, schema.model_fields, yaml.source)
    layers.check_keys(override.values, schema.model_fields, override.source)
    return layers.merge([yaml, *flag_layers(config, {name: name for name in names}), override])


def _renamed(layer: Source, schema: type[BaseModel]) -> Source:
    """Return the source with former argument names replaced, and log a warning for each.

    Raises:
        ConfigError: the source sets an argument by both names.
    """
    values = dict(layer.values)
    for old, new in _RENAMED.items():
        if old not in values or new not in schema.model_fields:
            continue
        if new in values:
            raise ConfigError(f"{layer.source}: {old} is the former name of {new}. Remove {old}.", field=old)
        _log.warning(
            "%s: argument %s was renamed; use %s (%s will be removed in the next release)", layer.source, old, new, old
        )
        values[new] = values.pop(old)
    return layer._replace(values=values)


def _checked(merged: Merged, schema: type[S], engine: str) -> S:
    try:
        return schema.model_validate(layers.nested(merged.leaves))
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        source = f" ({merged.leaves[key].source})" if key in merged.leaves else ""
        raise ConfigError(f"{engine} engine argument {key}{source}: {first['msg']}", field=key) from exc


def _is_one(name: str, value: float) -> bool:
    """Return True for a parallel size of 1, which every engine supports."""
    return name.endswith("_parallel_size") and value == 1


def _reject_foreign(config: WorkerConfig, name: str, schema: type[BaseModel], engine: str) -> None:
    if name not in schema.model_fields:
        why = "runs on one device" if name.endswith("_parallel_size") else "has no such setting"
        flag = "--" + name.replace("_", "-")
        source = config.source_of(name)
        suffix = "" if flag in source or source == CODE_SOURCE else f" ({source})"
        raise ConfigError(f"{flag}{suffix}: the {engine} engine {why}. Remove the flag.", field=name)
