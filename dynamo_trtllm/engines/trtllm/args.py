"""Merge the arguments of `LLM`: kernels profile < YAML < environment < flag < override JSON.

Deprecated keys are translated, and all arguments are checked against the installed release before
anything loads. The kernel profile for the GPU architecture, a file of `kernels_config/`, also has
environment variables.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, StrictInt, ValidationError

from dynamo_trtllm.config import environ, layers
from dynamo_trtllm.config.layers import Source, SourcedValue
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines import argument_schema as schema
from dynamo_trtllm.engines import arguments
from dynamo_trtllm.engines.gpu import Gpu, visible_gpus
from dynamo_trtllm.engines.manifests import ApiManifest, Presence
from dynamo_trtllm.engines.trtllm.api_manifests import LIBRARY
from dynamo_trtllm.engines.warm_up import cache_folders
from dynamo_trtllm.models.checkpoint import read_checkpoint
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.protocol.messages import Role

log = logging.getLogger(__name__)

FOLDER = Path("kernels_config")
BY_GPU = ("blackwell", "blackwell-rtx", "hopper")  # profiles with a list of architectures
FALLBACK = "fallback"


class KernelProfile(BaseModel, frozen=True):
    """One file of `kernels_config/`."""

    name: str
    sm: list[StrictInt] = []  # compute capabilities times ten
    # MoE backend -> algorithm for MXFP4 weights; the first is the default, the others are allowed.
    quantization: dict[str, str] = {}
    engine_args: dict[str, Any] = {}
    mxfp4_args: dict[str, Any] = {}  # additional arguments for models with MXFP4 weights
    environment: dict[str, str] = {}

    @property
    def source(self) -> str:
        """Name of the profile as the source of an argument."""
        return f"kernels profile {self.name}"


def choose_profile(name: str | None, gpus: Sequence[Gpu]) -> KernelProfile:
    """Return the named profile, else the one for the GPUs, else the fallback.

    Args:
        name: name of a profile, or path of a YAML file; None: choose by GPU.
        gpus: visible GPUs.

    Raises:
        ConfigError: the name is unknown, the file is invalid, or the GPUs need different profiles.
    """
    if name is not None:
        return load_profile(name)
    # The profiles that the GPUs need, by name.
    needed: dict[str, KernelProfile] = {}
    known = [load_profile(name) for name in BY_GPU]
    for gpu in gpus:
        fitting = [profile for profile in known if gpu.sm in profile.sm]
        profile = fitting[0] if fitting else load_profile(FALLBACK)
        needed[profile.name] = profile
    if len(needed) > 1:
        kinds = ", ".join(sorted({gpu.name for gpu in gpus}))
        raise ConfigError(
            f"The visible GPUs need different kernel profiles ({kinds}). Hide some with"
            " CUDA_VISIBLE_DEVICES, or choose one with --kernels-profile:"
            f" {', '.join(sorted(needed))}.",
            field="kernels_profile",
        )
    return next(iter(needed.values()), None) or load_profile(FALLBACK)


def load_profile(name: str) -> KernelProfile:
    """Read one profile.

    Args:
        name: name of a profile in `kernels_config/`, or path of a YAML file.

    Raises:
        ConfigError: there is no such profile, or the file is invalid.
    """
    is_name = re.fullmatch(r"[\w-]+", name) is not None
    path = FOLDER / f"{name}.yaml" if is_name else Path(name)
    found = layers.find_file(path)
    if is_name and not found.exists():
        known = ", ".join((*BY_GPU, FALLBACK))
        raise ConfigError(
            f"Unknown --kernels-profile {name}. Choose one of {known}, or pass a YAML file.",
            field="kernels_profile",
        )
    data = layers.read_yaml(found)
    layers.check_keys(data, KernelProfile.model_fields.keys() - {"name"}, str(path))
    try:
        return KernelProfile(name=path.stem, **data)
    except ValidationError as exc:
        first = exc.errors()[0]
        expected = (
            first["msg"]
            .replace("Input should be a valid", "expected a")
            .replace("a integer", "an integer")
        )
        fix = ". Put it in quotes." if first["type"] == "string_type" else ""
        # pydantic's mark of a wrong key
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise ConfigError(
            f"{path}: {key} is {first['input']!r}: {expected}{fix}", field=str(first["loc"][0])
        ) from exc


def apply_profile(profile: KernelProfile) -> None:
    """Export the profile's variables. Call it before TensorRT-LLM is imported.

    Variables that the user has set are not changed; a warning is logged.
    """
    for name, value in profile.environment.items():
        if environ.export(name, value, wanted_by=profile.source) == value:
            log.info("%s=%s (%s)", name, value, profile.source)


def rank_environment(config: WorkerConfig) -> tuple[KernelProfile, dict[str, str]]:
    """Return the kernel profile of this host, and the variables that each rank reads: its own and
    the caches'.

    The ranks of an engine on several nodes read them when they start, which is before this package
    runs on rank 0: there it is too late to set them. TensorRT-LLM need not be installed.

    Raises:
        ConfigError: as `choose_profile` does.
    """
    profile = choose_profile(config.kernels_profile, visible_gpus())
    caches = {} if config.compile_cache is None else cache_folders(config.compile_cache.absolute())
    return profile, {**profile.environment, **caches}


_LEGACY_SECTION = "pytorch_backend_config"
_TRANSCEIVER = "cache_transceiver_config"
_TIMEOUT = "kv_transfer_timeout_ms"
_RUNTIME = "transceiver_runtime"


def translate(layer: Source, notes: list[str]) -> Source:
    """Return one source with current keys instead of deprecated ones.

    Args:
        layer: the source.
        notes: receives a line for each deprecated key.

    Raises:
        ConfigError: a deprecated key and its replacement have different values.
    """
    work = _ArgumentTranslation(copy.deepcopy(dict(layer.values)), layer.source, notes)
    if isinstance(work.values.get(_LEGACY_SECTION), Mapping):
        for key, value in work.values.pop(_LEGACY_SECTION).items():
            if not isinstance(key, str):
                raise ConfigError(
                    f"{layer.source}: key {key!r} of {_LEGACY_SECTION} is not text; quote it",
                    field=_LEGACY_SECTION,
                )
            work.put(f"{_LEGACY_SECTION}.{key}", key, value)
    for old, new in LIBRARY.moved.items():
        work.move(old, new)
    work.graphs()
    if (overlap := work.pop_flag("enable_overlap_scheduler")) is not None:
        work.put("enable_overlap_scheduler", "disable_overlap_scheduler", not overlap)
    work.transceiver()
    if work.values.get("backend") == "pytorch":
        del work.values["backend"]  # the engine sets it
    return layer._replace(values=work.values)


class _ArgumentTranslation(NamedTuple):
    """State of one translation."""

    values: dict[str, Any]
    where: str
    notes: list[str]

    def move(self, old: str, new: str) -> None:
        parent, _, last = old.rpartition(".")
        level = self.values.get(parent) if parent else self.values
        if isinstance(level, dict) and last in level:
            self.put(old, new, level.pop(last))

    def graphs(self) -> None:
        """Translate `use_cuda_graph`: false becomes `cuda_graph_config: null`; true is the
        default.
        """
        is_on = self.pop_flag("use_cuda_graph")
        if is_on:
            current = self.values.setdefault("cuda_graph_config", {})
            self._agree("use_cuda_graph", "cuda_graph_config", current is not None)
            self._note("use_cuda_graph", "cuda_graph_config, which is on by default")
        elif is_on is not None:
            current = self.values.get("cuda_graph_config")
            self._agree("use_cuda_graph", "cuda_graph_config", current is None)
            self.values["cuda_graph_config"] = None
            self._note("use_cuda_graph", "cuda_graph_config: null")

    def transceiver(self) -> None:
        level = self.values.get(_TRANSCEIVER)
        backend = level.get("backend") if isinstance(level, dict) else None
        if isinstance(level, dict) and isinstance(backend, str) and backend != backend.upper():
            level["backend"] = backend.upper()
            self._note(f"{_TRANSCEIVER}.backend: {backend}", backend.upper())

    def pop_flag(self, key: str) -> bool | None:
        if key not in self.values:
            return None
        value = self.values.pop(key)
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{self.where}: {key} is {value!r}: expected true or false", field=key)

    def put(self, old: str, new: str, value: Any) -> None:
        *parents, last = new.split(".")
        level = self.values
        for parent in parents:
            if level.get(parent) is None:
                level[parent] = {}
            level = level[parent]
            if not isinstance(level, dict):
                raise ConfigError(
                    f"{self.where}: {parent} is {level!r}: expected a mapping (key: value)",
                    field=parent,
                )
        self._agree(old, new, last not in level or level[last] == value)
        level[last] = value
        # Booleans are shown as YAML writes them.
        shown = str(value).lower() if isinstance(value, bool) else value
        self._note(old, f"{new}: {shown}")

    def _agree(self, old: str, new: str, agrees: bool) -> None:
        if not agrees:
            raise ConfigError(
                f"{self.where}: {old} and {new} have different values. Remove {old}.", field=old
            )

    def _note(self, old: str, new: str) -> None:
        self.notes.append(f"{self.where}: {old} is deprecated; use {new}")


ADAPTER = "the trtllm engine"  # name of the source
# KV events that are buffered between two polls; more are lost. As Dynamo sets it
# (DEFAULT_KV_EVENT_BUFFER_MAX_SIZE in dynamo/trtllm/workers/llm_worker.py of 1.7): a long prompt
# that evicts others has thousands.
BUFFER_EVENTS = 100_000
_TIMEOUT_MARGIN = 1.1
# Two keys for the same setting: a profile's value of one is dropped if the other is set.
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


def described(config: WorkerConfig, release: ApiManifest) -> arguments.Described:
    """Return all arguments, with defaults and sources, for `--print-config`. Raises ConfigError."""
    args = trtllm_args(config, release)
    found = arguments.described_library_arguments(args)
    notes = (*found.notes, statistics_note(args))
    return found._replace(title=f"{found.title}, {args.profile.source}", notes=notes)


_STATISTICS = "enable_iter_perf_stats"


def statistics_note(args: TrtllmArgs) -> str:
    """Return what the executor's statistics cost or, if they are switched off, what is lost.

    Dynamo has them off by default because of their time in each iteration (workers/llm_worker.py
    and publisher.py of 1.7). TensorRT-LLM's default is off, too. They could not be measured without
    the real package.
    """
    leaf = args.leaves.get(_STATISTICS)
    # a value that equals it is not passed on
    source = leaf.source if leaf is not None else "the release's default"
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
    """Return defaults for the cache transceiver; {} without one.

    Also an aggregated engine creates a given one.

    The Python transceiver supports NIXL only, and newer builds choose it for every model: with
    another backend they fail when they create it (create_kv_cache_transceiver in
    _torch/pyexecutor/kv_cache_transceiver.py, main). Nothing but the timeout frees KV that no
    decode worker fetches, or ends a fetch of KV that never comes. It is longer than
    --kv-transfer-ttl-s, because it starts before the lifetime of KV transfer parameters does.
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

    A model class of newer builds has defaults of its own. They apply to the arguments that were not
    set explicitly, also not to the release's default (`apply_model_defaults_to_llm_args` in
    llmapi/llm_utils.py, main of 2026).
    """
    default = schema.default(release, key, given)
    return default is not None and type(default) is type(value) and default == value


def _without_postprocessing(leaves: dict[str, SourcedValue], notes: list[str]) -> None:
    """Disable postprocessing workers: they replace the results whose tokens and KV transfer
    parameters are read.
    """
    leaf = leaves.get("num_postprocess_workers")
    if leaf is not None and leaf.value:
        notes.append(
            f"num_postprocess_workers {leaf.value} ({leaf.source}) was changed to 0: the frontend"
            " detokenizes"
        )
        leaves["num_postprocess_workers"] = SourcedValue(0, ADAPTER)


def _check_together(get: Mapping[str, Any]) -> None:
    """Check TensorRT-LLM's constraints between arguments.

    Args:
        get: values by dotted key.

    Raises:
        ConfigError: two arguments conflict.
    """
    sizes = get.get("cuda_graph_config.batch_sizes")
    largest = get.get("cuda_graph_config.max_batch_size")
    if sizes and largest and max(sizes) != largest:
        raise ConfigError(
            f"cuda_graph_config.batch_sizes ends at {max(sizes)}, but"
            f" cuda_graph_config.max_batch_size is {largest}. Set only one of them.",
            field="cuda_graph_config.batch_sizes",
        )
    if get.get("attention_dp_config.enable_balance"):
        for name in ("timeout_iters", "batching_wait_iters"):
            key = f"attention_dp_config.{name}"
            if (get.get(key) or 0) < 0:
                raise ConfigError(
                    f"{key} is {get[key]}: expected 0 or more with enable_balance", field=key
                )


def _is_mxfp4(model_path: str) -> bool:
    """Return True if a profile's MXFP4 arguments apply, also if the model folder can't be read.

    The MoE backends of the profiles are chosen for MXFP4; for other models the release's default is
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

    Left out are those that the release lacks or has by default, and those that another source sets
    by another key.
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
            # pull request 19035 of TensorRT-LLM, and ModelConfig.resolve_moe_backend in
            # _torch/model_config.py
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
