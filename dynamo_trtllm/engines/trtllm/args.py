"""Merge the arguments of `LLM`: kernels profile < YAML < environment < flag < override JSON.

Deprecated keys are translated, and all arguments are checked against the installed release before
anything loads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_trtllm.config import layers
from dynamo_trtllm.config.layers import Source, SourcedValue
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines import arguments
from dynamo_trtllm.engines.gpu import Gpu, visible_gpus
from dynamo_trtllm.engines.manifests import ApiManifest, Presence
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.trtllm.deprecated_arguments import translate
from dynamo_trtllm.engines.trtllm.kernel_profiles import KernelProfile, choose_profile
from dynamo_trtllm.models.checkpoint import read_checkpoint
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role

ADAPTER = "the trtllm engine"  # name of the source
# The most KV events that are buffered between two polls. Further events are lost, and a long prompt
# that evicts other blocks has thousands. Dynamo uses the same number
# (DEFAULT_KV_EVENT_BUFFER_MAX_SIZE in dynamo/trtllm/workers/llm_worker.py of 1.7).
BUFFER_EVENTS = 100_000
_TRANSCEIVER = "cache_transceiver_config"
_TIMEOUT = "kv_transfer_timeout_ms"
_RUNTIME = "transceiver_runtime"
_TIMEOUT_MARGIN = 1.1
_STATISTICS = "enable_iter_perf_stats"
# Two keys for the same setting. A profile's value of one key is dropped if the other key is set.
_ALTERNATIVES = {
    "cuda_graph_config.max_batch_size": "cuda_graph_config.batch_sizes",
    "cuda_graph_config.batch_sizes": "cuda_graph_config.max_batch_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmArgs(arguments.LibraryArgs):
    """The merged and checked arguments of `LLM(model, backend="pytorch", **values)`."""

    profile: KernelProfile  # applied before TensorRT-LLM is imported


def trtllm_args(
    config: WorkerConfig, release: ApiManifest, gpus: Sequence[Gpu] | None = None
) -> TrtllmArgs:
    """Return the merged and checked arguments.

    Args:
        config: settings of the worker.
        release: API of the installed TensorRT-LLM.
        gpus: GPUs that choose the kernels profile; default: the visible ones.

    Raises:
        ConfigError: names the flag, file or key at fault.
    """
    profile = choose_profile(config.kernels_profile, visible_gpus() if gpus is None else gpus)
    notes: list[str] = []
    given = [translate(layer, notes) for layer in arguments.given_sources(config, LIBRARY.flags)]
    unchecked = [note for layer in given for note in arguments.check_source(layer, release)]
    mxfp4_args = profile.mxfp4_args if _is_mxfp4(config.model_path) else {}
    wanted = layers.merge(
        [Source(profile.engine_args, profile.source), Source(mxfp4_args, profile.source)]
    )
    own = _without_defaults(_adapter_arguments(config, given, release), given, release)
    merged = layers.merge([own, _advice(wanted.leaves, given, release, notes), *given])
    _without_postprocessing(merged.leaves, notes)
    runtime = merged.leaves.get(f"{_TRANSCEIVER}.{_RUNTIME}")
    if runtime is not None and runtime.source == ADAPTER:
        backend = merged.leaves[f"{_TRANSCEIVER}.backend"].value
        notes.append(
            f"{_TRANSCEIVER}.{_RUNTIME} was set to {runtime.value}: the Python transceiver has no"
            f" {backend}"
        )
    _check_together({key: leaf.value for key, leaf in merged.leaves.items()})
    return TrtllmArgs(
        release=release,
        profile=profile,
        values=layers.nested(merged.leaves),
        leaves=merged.leaves,
        notes=(*notes, *merged.notes, *unchecked),
    )


def described(config: WorkerConfig, release: ApiManifest) -> arguments.DescribedArguments:
    """Return all arguments, with defaults and sources, for `--print-config`. Raises ConfigError."""
    args = trtllm_args(config, release)
    found = arguments.described_library_arguments(args)
    notes = (*found.notes, statistics_note(args))
    return found._replace(title=f"{found.title}, {args.profile.source}", notes=notes)


def statistics_note(args: TrtllmArgs) -> str:
    """Return what the executor's statistics cost or, if they are switched off, what is lost.

    In Dynamo, the statistics are off by default, because they cost time in each iteration
    (workers/llm_worker.py and publisher.py of 1.7). TensorRT-LLM's default is off, too. The time
    could not be measured without the real package.
    """
    leaf = args.leaves.get(_STATISTICS)
    # A value that equals the release's default is not passed on.
    source = "the release's default" if leaf is None else leaf.source
    if args.get(_STATISTICS):
        return (
            f"{_STATISTICS} is true ({source}): it costs time in each step; KV metrics, the cost"
            " model and the detection of a stalled executor need it"
        )
    return (
        f"{_STATISTICS} is false ({source}): this worker reports no KV blocks and no waiting"
        " requests, learns no cost model, does not notice a stalled executor, and limits neither KV"
        " that waits for its transfer nor KV that has leaked"
    )


def _adapter_arguments(
    config: WorkerConfig, given: Sequence[Source], release: ApiManifest
) -> Source:
    """Return the engine's own defaults, which every other source overrides."""
    values: dict[str, Any] = {_STATISTICS: True}  # see `statistics_note`
    if config.publish_kv_events:
        values["kv_cache_config"] = {"event_buffer_max_size": BUFFER_EVENTS}
    if transceiver := _own_transceiver(config, given, release):
        values[_TRANSCEIVER] = transceiver
    return Source(values, ADAPTER)


def _own_transceiver(
    config: WorkerConfig, given: Sequence[Source], release: ApiManifest
) -> dict[str, Any]:
    """Return defaults for the cache transceiver that a source has configured; {} if no source has
    configured one. An aggregated engine creates a configured transceiver, too.

    For other backends than NIXL, the C++ transceiver is chosen. The Python transceiver supports
    NIXL only, and newer builds choose the Python transceiver for every model: with another backend
    they fail when they create it (create_kv_cache_transceiver in
    _torch/pyexecutor/kv_cache_transceiver.py, main).

    A timeout is set, because nothing else frees KV that no decode worker fetches, or ends a fetch
    of KV that never comes. The timeout is longer than --kv-transfer-ttl-s, because it starts before
    the lifetime of KV transfer parameters does.
    """
    backend = layers.merge(given).leaves.get(f"{_TRANSCEIVER}.backend")
    if backend is None or backend.value is None:
        return {}
    has = {
        name: release.presence("CacheTransceiverConfig", name) is Presence.PRESENT
        for name in (_TIMEOUT, _RUNTIME)
    }
    values: dict[str, Any] = {}
    if has[_TIMEOUT] and config.disaggregation_mode is not Role.AGGREGATED:
        values[_TIMEOUT] = math.ceil(config.kv_transfer_ttl_s * _TIMEOUT_MARGIN * 1000)
    if has[_RUNTIME] and backend.value not in ("NIXL", "DEFAULT"):
        values[_RUNTIME] = "CPP"
    return values


def _without_defaults(own: Source, given: Sequence[Source], release: ApiManifest) -> Source:
    """Return the engine's own arguments, without those that equal the release's default."""
    decided = layers.nested(layers.merge(given).leaves)
    leaves = layers.merge([own]).leaves
    kept = {
        key: leaf
        for key, leaf in leaves.items()
        if not _is_default(release, key, leaf.value, decided)
    }
    return own._replace(values=layers.nested(kept))


def _is_default(release: ApiManifest, key: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Return True if a value equals the release's default, so that it must not be passed on.

    In newer builds, a model class has defaults of its own, which apply only to arguments that were
    not set. An argument that is passed on would count as set, even if its value is the release's
    default (`apply_model_defaults_to_llm_args` in llmapi/llm_utils.py, main of 2026).
    """
    default = schema.default(release, key, given)
    return default is not None and type(default) is type(value) and default == value


def _without_postprocessing(leaves: dict[str, SourcedValue], notes: list[str]) -> None:
    """Disable postprocessing workers, because they replace the results from which tokens and KV
    transfer parameters are read.
    """
    leaf = leaves.get("num_postprocess_workers")
    if leaf is not None and leaf.value:
        notes.append(
            f"num_postprocess_workers {leaf.value} ({leaf.source}) was changed to 0: the frontend"
            " detokenizes"
        )
        leaves["num_postprocess_workers"] = SourcedValue(0, ADAPTER)


def _check_together(values: Mapping[str, Any]) -> None:
    """Check TensorRT-LLM's constraints between arguments.

    Args:
        values: values by dotted key.

    Raises:
        ConfigError: two arguments conflict.
    """
    sizes = values.get("cuda_graph_config.batch_sizes")
    largest = values.get("cuda_graph_config.max_batch_size")
    if sizes and largest and max(sizes) != largest:
        raise ConfigError(
            f"cuda_graph_config.batch_sizes ends at {max(sizes)}, but"
            f" cuda_graph_config.max_batch_size is {largest}. Set only one of them.",
            field="cuda_graph_config.batch_sizes",
        )
    if values.get("attention_dp_config.enable_balance"):
        for name in ("timeout_iters", "batching_wait_iters"):
            key = f"attention_dp_config.{name}"
            if (values.get(key) or 0) < 0:
                raise ConfigError(
                    f"{key} is {values[key]}: expected 0 or more with enable_balance", field=key
                )


def _is_mxfp4(model_path: str) -> bool:
    """Return True if a profile's MXFP4 arguments apply, also if the model folder can't be read.

    The MoE backends of the profiles are chosen for MXFP4. For other models the release's default is
    better.
    """
    try:
        return read_checkpoint(Path(model_path)).quantization == "mxfp4"
    except ConfigError:
        return True


def _advice(
    wanted: Mapping[str, SourcedValue],
    given: Sequence[Source],
    release: ApiManifest,
    notes: list[str],
) -> Source:
    """Return a profile's arguments, as far as they apply and change something.

    Arguments are left out if the release lacks them, if they equal the release's default, or if
    another source sets them by another key.
    """
    decided = layers.merge(given).leaves
    decided_values = layers.nested(decided)
    applied: dict[str, SourcedValue] = {}
    source = next((leaf.source for leaf in wanted.values()), "")
    for key, leaf in wanted.items():
        if schema.find(release, key).presence is Presence.ABSENT and schema.is_known(
            release.library, key
        ):
            notes.append(
                f"{source}: {key} is dropped: TensorRT-LLM {release.title} has no such argument"
            )
            continue
        try:
            schema.check(layers.nested({key: leaf}), release, source)
        except ConfigError as exc:
            if not schema.is_known(release.library, key):
                raise
            if key not in decided:
                notes.append(f"{exc.message}; dropped")
            continue
        if leaf.value == "TRITON" and schema.default(release, key, {}) == "AUTO":
            # See pull request 19035 of TensorRT-LLM, and ModelConfig.resolve_moe_backend in
            # _torch/model_config.py.
            notes.append(
                f"{source}: {key} TRITON is dropped: 1.3 deprecates it, and AUTO takes it while it"
                " exists"
            )
            continue
        if _is_default(release, key, leaf.value, decided_values):
            if key not in decided:
                default = (
                    f"the default of TensorRT-LLM {release.title}, which a model may replace with"
                    " its own"
                )
                notes.append(f"{source}: {key} {leaf.value} is not passed on: it is {default}")
            continue
        if _ALTERNATIVES.get(key) not in decided:
            applied[key] = leaf
    return Source(layers.nested(applied), source, is_default=True)
