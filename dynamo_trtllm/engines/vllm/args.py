"""Build and check the arguments of `AsyncEngineArgs` from a worker's configuration.

This happens before anything loads. Later sources win: YAML < environment < flag < override JSON.
The arguments are checked against the installed release. vLLM is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dynamo_trtllm.config import layers
from dynamo_trtllm.config.config_base import DEFAULT_SOURCE
from dynamo_trtllm.config.layers import Source, SourcedValue
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import arguments
from dynamo_trtllm.engines.manifests import ApiManifest
from dynamo_trtllm.engines.vllm import releases
from dynamo_trtllm.engines.vllm.api_manifests import LIBRARY
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role

_ADAPTER = "the vllm engine"  # name of the source in messages
EXTENSION = "dynamo_trtllm.engines.vllm.extension.WorkerExtension"
CONNECTOR = "dynamo_trtllm.engines.vllm.connector"
SCHEDULER = "dynamo_trtllm.engines.vllm.steps.MeasuredScheduler"
# NixlConnector reads each block of each layer as a piece of its own, and posts all pieces in the
# thread that launches the steps, for which every running stream waits. On two H200 with the shape
# of gpt-oss-120b that took 62 ms for a prompt of 8,192 tokens with vLLM's default of 16, and 9 ms
# with 128.
TRANSFER_BLOCK_TOKENS = 128
# vLLM's lease outlives the KV transfer; the engine frees KV in time, see `KvReleaser`.
_LEASE_SPARE_S = 5
# An elastic engine sends and reads KV.
_KV_ROLES: Final = {
    Role.PREFILL: "kv_producer",
    Role.DECODE: "kv_consumer",
    Role.ELASTIC: "kv_both",
}
CAPTURE_SIZES: Final = "compilation_config.cudagraph_capture_sizes"
# Of vLLM's arguments, those that say which CUDA graphs are captured. vLLM has the first two also at
# the top.
_CAPTURE_KEYS: Final = frozenset(
    {
        CAPTURE_SIZES,
        "compilation_config.max_cudagraph_capture_size",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "performance_mode",
    }
)
# Arguments whose product is the number of ranks over which vLLM distributes experts.
_EXPERT_RANKS: Sequence[str] = ("tensor_parallel_size", "data_parallel_size")


def vllm_args(config: WorkerConfig, release: ApiManifest) -> arguments.LibraryArgs:
    """Return the merged and checked arguments of `AsyncEngineArgs(model=..., **values)`.

    Args:
        config: the settings of the worker.
        release: the API of the release that will get the arguments.

    Raises:
        ConfigError: an argument is unknown or invalid. The error names the flag, file or key.
    """
    if config.kernels_profile is not None:
        raise ConfigError(
            f"{config.source_of('kernels_profile')} {config.kernels_profile}: profiles are for the"
            " trtllm engine; with vLLM, remove it or set moe_backend and attention_backend",
            field="kernels_profile",
        )
    # Flags for TensorRT-LLM's arguments are rejected with the same text as the arguments.
    foreign_names = LIBRARY.foreign.keys() - LIBRARY.flags.keys()
    foreign = {name: name for name in arguments.ENGINE_FLAGS if name in foreign_names}
    given = arguments.given_sources(config, LIBRARY.flags | foreign)
    unchecked: list[str] = []
    for source in given:
        _check_supported(source)
        unchecked += arguments.check_source(source, release)
    merged = layers.merge([_adapter_arguments(config), *_defaults(config, given), *given])
    _check_kv_events(config, merged.leaves)
    experts = _experts(config, merged.leaves)
    if experts is not None:
        merged.leaves["enable_expert_parallel"] = experts
    return arguments.LibraryArgs(
        release=release,
        values=layers.nested(merged.leaves),
        leaves=merged.leaves,
        notes=(*merged.notes, *_meanings(config), *unchecked),
    )


def described(config: WorkerConfig) -> arguments.DescribedArguments:
    """Return all arguments with their sources, defaults included.

    They are those of the installed release, else of the newest.

    Raises:
        ConfigError: see `vllm_args`.
    """
    return arguments.described_library_arguments(vllm_args(config, releases.manifest()))


def _adapter_arguments(config: WorkerConfig) -> Source:
    """Return the engine's own arguments.

    A configuration may override those that are not in `engine_set`.
    """
    values: dict[str, Any] = {"enable_prefix_caching": True, "worker_extension_cls": EXTENSION}
    role = config.disaggregation_mode
    if role is Role.AGGREGATED:
        # In the other roles, the connector measures the scheduler's steps.
        values["scheduler_cls"] = SCHEDULER
    else:
        lease_s = math.ceil(config.kv_transfer_ttl_s) + _LEASE_SPARE_S
        values["kv_transfer_config"] = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": _KV_ROLES[role],
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": lease_s},
        }
    if config.publish_kv_events:
        values["kv_events_config"] = {"enable_kv_cache_events": True, "publisher": "zmq"}
    return Source(values, _ADAPTER)


def _defaults(config: WorkerConfig, given: Sequence[Source]) -> list[Source]:
    """Return this project's own defaults, which any setting of the user overrides.

    Their source says the reason.

    Args:
        config: the settings of the worker.
        given: what the user sets.
    """
    defaults = []
    if config.disaggregation_mode is not Role.AGGREGATED:
        reason = f"{_ADAPTER}, so that KV is transferred in large pieces"
        defaults.append(Source({"block_size": TRANSFER_BLOCK_TOKENS}, reason))
    # The key of compiled code has the sizes. Those of all roles are equal, so that all use the same
    # code.
    leaves = layers.merge(given).leaves
    # Ranks of data parallelism step together: each step is padded to the largest one, if that has a
    # graph. Then ranks with streams would compute as much as one with a prompt.
    num_ranks = leaves["data_parallel_size"].value if "data_parallel_size" in leaves else 1
    if num_ranks == 1 and not leaves.keys() & _CAPTURE_KEYS:
        reason = f"{_ADAPTER}, so that prompts and streams do not wait for the launch of steps"
        defaults.append(Source({CAPTURE_SIZES: captured_sizes()}, reason))
    return defaults


def captured_sizes() -> list[int]:
    """Return the numbers of tokens of a step for which vLLM captures CUDA graphs.

    Without a graph, the launch of a step takes longer than its computation, up to about 4,096
    tokens: with vLLM 0.26 on an H200, gpt-oss-120b and 64 streams, a step with 1,024 prompt tokens
    takes 115 ms without a graph and 54 ms with one, and one with 2,048 takes 99 and 81. vLLM's own
    sizes end at 1,024 for gpt-oss and at 512 for others. A step is padded to the next size, which
    is at most an eighth larger from 64 on.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16)]
    for end in (1024, 2048, 4096):
        sizes += range(end // 2, end, end // 16)
    return [*sizes, 4096]


def _check_supported(source: Source) -> None:
    """Raise ConfigError for arguments that this engine does not support.

    They are those of TensorRT-LLM, and those that need several engines, drafts or adapters.
    """
    for key, value in source.values.items():
        root, _, _ = key.partition(".")
        if root in LIBRARY.foreign:
            raise ConfigError(
                f"{source.name}: {root} is an argument of the trtllm engine; with vLLM use"
                f" {LIBRARY.foreign[root]}",
                field=root,
            )
        if key in LIBRARY.unsupported and value:
            raise ConfigError(
                f"{source.name}: {key} is {value!r}: a worker runs one engine on one machine,"
                " without speculative decoding and LoRA; remove it",
                field=key,
            )


def _check_kv_events(config: WorkerConfig, leaves: Mapping[str, SourcedValue]) -> None:
    """Check that vLLM has KV events with these arguments. Raises ConfigError."""
    caching = leaves["enable_prefix_caching"]
    if config.publish_kv_events and caching.value is False:
        raise ConfigError(
            f"--publish-kv-events needs enable_prefix_caching, which is False ({caching.source});"
            " set only one of them",
            field="enable_prefix_caching",
        )


def _experts(config: WorkerConfig, leaves: Mapping[str, SourcedValue]) -> SourcedValue | None:
    """Return whether expert parallelism is on, from --expert-parallel-size.

    vLLM distributes experts over all ranks or none.

    Raises:
        ConfigError: the number of ranks is another one.
    """
    wanted = config.expert_parallel_size
    if wanted is None:
        return None
    source = config.source_of("expert_parallel_size")
    sizes = dict.fromkeys(_EXPERT_RANKS, 1)
    for key in sizes.keys() & leaves.keys():
        sizes[key] = int(leaves[key].value)
    ranks = math.prod(sizes.values())
    if wanted not in (1, ranks):
        product = " times ".join(f"{key} {size}" for key, size in sizes.items())
        raise ConfigError(
            f"{source} is {wanted}: vLLM distributes experts over all {ranks} ranks ({product}) or"
            f" none; set it to {ranks} or 1",
            field="expert_parallel_size",
        )
    is_on = wanted > 1
    set_here = leaves.get("enable_expert_parallel")
    # With one rank, both values mean the same.
    if set_here is not None and set_here.value is not is_on and ranks > 1:
        raise ConfigError(
            f"{source} is {wanted}, but enable_expert_parallel is {set_here.value}"
            f" ({set_here.source}); set only one",
            field="expert_parallel_size",
        )
    return SourcedValue(is_on, source)


def _meanings(config: WorkerConfig) -> list[str]:
    """Return notes about settings that mean something else here than with other engines."""
    notes = []
    has_default_role = config.source_of("disaggregation_mode") == DEFAULT_SOURCE
    if config.disaggregation_mode is Role.DECODE and has_default_role:
        notes.append(
            "--disaggregation-mode is not set: this is a decode worker, as in Dynamo; for an"
            " aggregated worker set --disaggregation-mode prefill_and_decode"
        )
    if config.free_gpu_memory_fraction is not None:
        notes.append(
            f"--free-gpu-memory-fraction {config.free_gpu_memory_fraction:g} sets vLLM's"
            " gpu_memory_utilization: a fraction of all GPU memory, weights included, and not of"
            " the memory that is free after loading them"
        )
    return notes
