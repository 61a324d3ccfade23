"""Name the engines: those of this package with what is known of each, and those of other packages.

Nothing is imported. An engine of another package is an entry point of the group ENTRY_POINTS.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Final

from pydantic import BaseModel

from dynamo_trtllm.config.suggestions import suggest
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role

ENTRY_POINTS: Final = "dynamo_trtllm.engines"
DEFAULT_ENGINE: Final = "trtllm"  # the default engine, if it is installed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """What a worker must know of an engine before it creates it.

    An engine of another package has them as the class attribute `traits`.
    """

    # True: --model-path is a folder or the name of a bundled model, the engine gets the folder, and
    # requests default to the sampling values in it. False: the engine gets what was given.
    reads_model: bool = False
    # The pydantic model of the engine's arguments. None: it has none, and a worker rejects all.
    arguments: type[BaseModel] | None = None
    # True: the worker fills in the default address of --kv-transfer-host. False: it rejects the
    # flag.
    uses_kv_transfer_host: bool = False
    uses_kv_transfer_bind_host: bool = False  # False: a worker rejects --kv-transfer-bind-host


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInEngine:
    """What is known of an engine of this package without an import of its modules."""

    title: str
    traits: EngineTraits
    # The component of decode and aggregated workers, as in Dynamo.
    component: str = "tensorrt_llm"
    default_role: Role = Role.AGGREGATED
    reads_gguf: bool = False
    # One of these must be in the folder of a model. (): any files, which the library checks.
    weight_files: tuple[str, ...] = ()
    # True: decode workers map a prefill worker's whole KV pool (CUDA IPC) and unmap it only when
    # they exit. So after a prefill worker was killed, its GPU memory is free only when they have
    # ended: https://github.com/openucx/ucx/issues/11753. UCX_CUDA_IPC_CACHE=n does not change this:
    # on two H200 with vLLM 0.33, 55 GiB stayed in use. The torch engine maps only a bounded staging
    # region. It is not known whether TensorRT-LLM keeps mappings: its value is False.
    keeps_kv_mapped: bool = False
    # Why no configuration can run an elastic worker, as text that names the argument. "": one can.
    elastic_obstacle: str = ""


BUILT_IN: Final[Mapping[str, BuiltInEngine]] = {
    "trtllm": BuiltInEngine(
        title="TensorRT-LLM",
        traits=EngineTraits(reads_model=True),
        elastic_obstacle=(
            "kv_cache_config: TensorRT-LLM does not report how many KV blocks it has, so KV for"
            " other workers can't be limited, and two workers could wait for each other for ever"
        ),
    ),
    "vllm": BuiltInEngine(
        title="vLLM",
        traits=EngineTraits(reads_model=True, uses_kv_transfer_host=True),
        component="backend",
        default_role=Role.DECODE,
        keeps_kv_mapped=True,
    ),
    "torch": BuiltInEngine(
        title="torch",
        traits=EngineTraits(
            reads_model=True, uses_kv_transfer_host=True, uses_kv_transfer_bind_host=True
        ),
        reads_gguf=True,
        weight_files=(
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
        ),
    ),
    # The mock engine takes only the name of the model from the path.
    "mock": BuiltInEngine(
        title="mock",
        traits=EngineTraits(uses_kv_transfer_host=True, uses_kv_transfer_bind_host=True),
    ),
}


def package_of(entry: EntryPoint) -> str:
    """Return name and version of the package that has an entry point."""
    if entry.dist is None:
        return "an unknown package"
    return f"{entry.dist.name} {entry.dist.version}"


def engine_entry_points() -> list[EntryPoint]:
    """Return the entry points of the engines of other packages, by name."""
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return sorted(found, key=lambda entry: (entry.name, package_of(entry)))


def find_entry_point(name: str) -> EntryPoint | None:
    """Return the entry point of an engine of another package; None if no package has one.

    Raises:
        ConfigError: several packages have an engine with this name, or this package has one, too.
    """
    entries = [entry for entry in engine_entry_points() if entry.name == name]
    owners = [package_of(entry) for entry in entries]
    if owners and name in BUILT_IN:
        raise ConfigError(
            f"{' and '.join(owners)} claims the name of the built-in engine {name}; uninstall it,"
            " or ask its author for another name",
            field="engine",
        )
    if len(owners) > 1:
        raise ConfigError(
            f"the engine name {name} is ambiguous: {' and '.join(owners)} have an engine with this"
            " name; uninstall all packages but one",
            field="engine",
        )
    return entries[0] if entries else None


def check_engine_name(name: str) -> str:
    """Return the name of an engine that is built in or installed.

    Raises:
        ValueError: there is no such engine, or several packages have one.
    """
    if name in BUILT_IN:
        return name
    try:
        entry = find_entry_point(name)
    except ConfigError as exc:
        raise ValueError(exc.message) from exc
    if entry is None:
        installed = engine_entry_points()
        others = [f"{other.name} of {package_of(other)}" for other in installed]
        meant = suggest(name, [*BUILT_IN, *(other.name for other in installed)])
        hint = "" if meant is None else f"did you mean {meant}? "
        raise ValueError(
            f"there is no engine {name!r}; {hint}built in: {', '.join(BUILT_IN)}; installed:"
            f" {', '.join(others) or 'none'}"
        )
    return name
