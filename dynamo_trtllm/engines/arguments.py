"""Merge an engine's arguments from a worker's configuration, check them by the engine's schema, and
remember their sources.

Later sources override earlier ones: YAML < environment < flag < override JSON. The schema is a
pydantic model if the engine belongs to this package, and the manifest of a release if the engine
wraps a library.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from dynamo_trtllm.config import layers
from dynamo_trtllm.config.config_base import CODE_SOURCE
from dynamo_trtllm.config.layers import Merged, Source, SourcedValue
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import argument_schema as library_schema
from dynamo_trtllm.engines.manifests import ApiManifest
from dynamo_trtllm.protocol.errors import ConfigError

log = logging.getLogger(__name__)

S = TypeVar("S", bound=BaseModel)

# Every flag that sets an engine argument. A flag that the chosen engine has no argument for is
# rejected.
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
    "enable_attention_dp",
    "gpus_per_node",
    "max_beam_width",
    "guided_decoding_backend",
)


class DescribedArguments(NamedTuple):
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
        log.info("%s", note)
    args = _checked(merged, schema, engine)
    if config.publish_kv_events and not getattr(args, "enable_prefix_caching", True):
        raise ConfigError(
            "--publish-kv-events needs the engine argument enable_prefix_caching: true. Set it, or"
            " remove the flag.",
            field="enable_prefix_caching",
        )
    return args


class NoArguments(BaseModel):
    """The arguments of an engine that has none."""


def described_arguments(
    config: WorkerConfig, schema: type[BaseModel], engine: str
) -> DescribedArguments:
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
    return DescribedArguments(f"the {engine} engine", merged.leaves, every, tuple(merged.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryArgs:
    """The merged and checked arguments of one worker whose engine wraps a library."""

    release: ApiManifest
    values: Mapping[str, Any]  # nested, as the library receives them
    leaves: Mapping[str, SourcedValue]  # values that were set and their sources, by dotted key
    notes: tuple[str, ...]  # lines to log: overridden values, deprecated keys, unchecked keys

    def get(self, key: str) -> Any:
        """Return the value of a dotted key, else the release's default, else None.

        Raises:
            KeyError: no known release has the key.
        """
        level: Any = self.values
        for part in key.split("."):
            if not isinstance(level, Mapping):
                return None  # a section that is null
            if part not in level:
                if not library_schema.is_known(self.release.library, key):
                    raise KeyError(key)
                return library_schema.default(self.release, key, self.values)
            level = level[part]
        return level

    def count(self, key: str) -> int:
        """Return the value of an argument that counts ranks; 1 if it is not set."""
        return int(self.get(key) or 1)


def check_source(source: Source, release: ApiManifest) -> list[str]:
    """Check the arguments of one source for an engine that wraps a library.

    Args:
        source: the source.
        release: API of the library.

    Returns:
        A note for each key and each value that can't be checked.

    Raises:
        ConfigError: names the source and the key at fault.
    """
    for key, leaf in layers.merge([source]).leaves.items():
        for name, fix in release.library.engine_set.items():
            if key == name or key.startswith(f"{name}."):
                raise ConfigError(
                    f"{source.name}: {key} is {leaf.value!r}: {fix}; remove it", field=key
                )
    try:
        return library_schema.check(source.values, release, source.name)
    except ConfigError as exc:
        key = exc.field or ""
        value = layers.merge([source]).leaves.get(key)
        hint = None
        if value is not None:
            hint = release.library.removed_values.get(key, {}).get(str(value.value))
        if hint is None:
            raise
        raise ConfigError(f"{exc.message}. {hint}", field=exc.field) from exc


def described_library_arguments(args: LibraryArgs) -> DescribedArguments:
    """Return all arguments of an engine that wraps a library, with defaults and sources.

    Defaults of arguments that only the engine sets do not apply.
    """
    release = args.release
    library = args.release.library
    title = f"{library.name} {release.title}"
    keys = [
        key
        for key in library_schema.every_key(release, args.values)
        if key not in library.engine_set
    ]
    # A key is not listed itself if keys inside it are given.
    sections = {key for key in keys if any(leaf.startswith(f"{key}.") for leaf in args.leaves)}
    values = {key: _default(args, key) for key in keys if key not in sections}
    values |= args.leaves
    order = {key: i for i, key in enumerate(release.fields(library.root))}

    def place(key: str) -> int:
        first = key.partition(".")[0]
        return order.get(first, len(order))

    ordered = {key: values[key] for key in sorted(values, key=place)}
    return DescribedArguments(title, args.leaves, ordered, args.notes)


def _default(args: LibraryArgs, key: str) -> SourcedValue:
    """Return the release's default of an argument.

    The source of the value says if only a part of the argument's class was read.
    """
    release = args.release
    _, field, owner = library_schema.find(release, key)
    is_known = field is None or field.default_known
    extent = ", read in part" if release.is_in_part(owner) else ""
    source = f"default ({release.library.name} {release.name}{extent})"
    return SourcedValue(args.get(key) if is_known else "not read", source)


def given_sources(config: WorkerConfig, flags: Mapping[str, str]) -> list[Source]:
    """Return the sources of a worker's engine arguments; each overrides those before it.

    Args:
        config: settings of the worker.
        flags: maps a field of `config` to the dotted name of the engine argument.

    Raises:
        ConfigError: the file of `--extra-engine-args` is missing or is not a YAML mapping.
    """
    from_environment: list[Source] = []
    from_flags: list[Source] = []
    for field, key in flags.items():
        value = getattr(config, field)
        if value is None:
            continue
        source = Source(layers.nested({key: SourcedValue(value, "")}), config.source_of(field))
        if source.name.startswith("environment "):
            from_environment.append(source)
        else:
            from_flags.append(source)
    return [file_layer(config), *from_environment, *from_flags, override_layer(config)]


def file_layer(config: WorkerConfig) -> Source:
    """Return the arguments in the file of `--extra-engine-args`; an empty source without the flag.

    Raises:
        ConfigError: the file is missing or is not a YAML mapping.
    """
    path = config.extra_engine_args
    if not path:
        return Source({}, "YAML")
    return Source(layers.read_yaml(layers.find_file(path)), f"YAML {path}")


def override_layer(config: WorkerConfig) -> Source:
    """Return the arguments of `--override-engine-args`."""
    return Source(config.override_engine_args or {}, layers.OVERRIDE_SOURCE)


def _merged(config: WorkerConfig, schema: type[BaseModel], engine: str) -> Merged:
    """Return the merged arguments. Raises ConfigError for an argument that the engine lacks."""
    settings = {name: getattr(config, name) for name in ENGINE_FLAGS}
    given = {name: value for name, value in settings.items() if value is not None}
    # Every engine supports a parallel size of 1, even if the engine has no argument for this size.
    sizes_of_1 = {
        name for name, value in given.items() if name.endswith("_parallel_size") and value == 1
    }
    left_out = sizes_of_1 - schema.model_fields.keys()
    names = [name for name in given if name not in left_out]
    for name in names:
        _reject_foreign(config, name, schema, engine)
    for name in ("kernels_profile", "compile_cache"):
        if getattr(config, name) is not None:
            _reject_foreign(config, name, schema, engine)
    given_layers = given_sources(config, {name: name for name in names})
    for source in given_layers:
        layers.check_keys(source.values, schema.model_fields, source.name)
    return layers.merge(given_layers)


def _checked(merged: Merged, schema: type[S], engine: str) -> S:
    try:
        return schema.model_validate(layers.nested(merged.leaves))
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        source = f" ({merged.leaves[key].source})" if key in merged.leaves else ""
        raise ConfigError(
            f"{engine} engine argument {key}{source}: {first['msg']}", field=key
        ) from exc


def _reject_foreign(config: WorkerConfig, name: str, schema: type[BaseModel], engine: str) -> None:
    if name not in schema.model_fields:
        why = "runs on one device" if name.endswith("_parallel_size") else "has no such setting"
        flag = "--" + name.replace("_", "-")
        source = config.source_of(name)
        suffix = "" if flag in source or source == CODE_SOURCE else f" ({source})"
        raise ConfigError(
            f"{flag}{suffix}: the {engine} engine {why}. Remove the flag.", field=name
        )
