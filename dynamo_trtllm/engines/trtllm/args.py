"""The arguments of `LLM` from a worker's configuration: kernels profile < YAML < environment < typed flag < override.

Checked against the installed release before anything loads; old spellings are translated. Imports no vendor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_trtllm.config import layers
from dynamo_trtllm.config.layers import Source, Sourced
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.arguments import Described, file_layer, flag_layers, override_layer
from dynamo_trtllm.engines.checkpoint import read_checkpoint
from dynamo_trtllm.engines.gpu import Gpu, visible_gpus
from dynamo_trtllm.engines.trtllm import kernels, schema
from dynamo_trtllm.engines.trtllm.api_manifests import ApiManifest, Presence
from dynamo_trtllm.engines.trtllm.deprecated_args import translate
from dynamo_trtllm.engines.trtllm.kernels import KernelProfile
from dynamo_trtllm.errors import ConfigError

# Our flag -> their argument.
FLAGS: Mapping[str, str] = {
    "load_format": "load_format",
    "tensor_parallel_size": "tensor_parallel_size",
    "expert_parallel_size": "moe_expert_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "max_num_tokens": "max_num_tokens",
    "max_batch_size": "max_batch_size",
    "max_seq_len": "max_seq_len",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "kv_block_size": "kv_cache_config.tokens_per_block",
}

# Arguments that the engine sets itself: a configuration must not.
_OURS = {
    "model": "give --model-path",
    "backend": "only pytorch is driven here; leave it out",
}
_ADAPTER = "the trtllm engine"  # as a source
# Two ways to say the same: advice in one gives way to the other.
_EITHER = {
    "cuda_graph_config.max_batch_size": "cuda_graph_config.batch_sizes",
    "cuda_graph_config.batch_sizes": "cuda_graph_config.max_batch_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmArgs:
    """The merged and checked arguments of one worker."""

    release: ApiManifest
    profile: KernelProfile  # to be applied before TensorRT-LLM is imported
    values: Mapping[str, Any]  # nested, for `LLM(model, backend="pytorch", **values)`
    leaves: Mapping[str, Sourced]  # what was set, by dotted key, with the place that won
    notes: tuple[str, ...]  # lines to log: contradictions, old spellings, what could not be checked

    def get(self, key: str) -> Any:
        """The value set for a dotted key, else the release's default, else None. KeyError if no release has the key."""
        if key in self.leaves:
            return self.leaves[key].value
        level: Any = self.values
        for part in key.split("."):
            if not isinstance(level, Mapping):
                return None  # a part that is switched off
            if part not in level:
                return self._default(key)
            level = level[part]
        return level

    def _default(self, key: str) -> Any:
        if not schema.is_known(key):
            raise KeyError(key)
        inside = key.rpartition(".")[0] in self.values  # a part that is on because something of it was set
        field = schema.find(self.release, key).field
        return field.default if inside and field is not None else schema.default(self.release, key)


def trtllm_args(config: WorkerConfig, release: ApiManifest, gpus: Sequence[Gpu] | None = None) -> TrtllmArgs:
    """Raises ConfigError naming the flag, file or key at fault. `gpus`: without them the driver is asked."""
    profile = kernels.choose(config.kernels_profile, visible_gpus() if gpus is None else gpus)
    notes: list[str] = []
    given = [
        _translated(file_layer(config), notes),
        *flag_layers(config, FLAGS),
        _translated(override_layer(config), notes),
    ]
    unread = [found for layer in given for found in schema.check(layer.values, release, layer.source)]
    wanted = layers.merge(
        [
            Source(profile.engine_args, profile.source),
            Source(profile.mxfp4_args if _is_mxfp4(config.model_path) else {}, profile.source),
        ]
    )
    merged = layers.merge([_own(given, release), _advice(wanted.leaves, given, release, notes), *given])
    _without_postprocessing(merged.leaves, notes)
    schema.check_together({key: leaf.value for key, leaf in merged.leaves.items()})
    return TrtllmArgs(
        release=release,
        profile=profile,
        values=layers.nested(merged.leaves),
        leaves=merged.leaves,
        notes=(*notes, *merged.notes, *(_unchecked(each, release) for each in unread)),
    )


def described(config: WorkerConfig, release: ApiManifest) -> Described:
    """The arguments with the places they come from, defaults included. Raises ConfigError."""
    args = trtllm_args(config, release)
    keys = [key for key in schema.every_key(release, args.values) if key not in _OURS]
    every = {key: Sourced(args.get(key), f"default ({release.name})") for key in keys}
    whole = {key for key in every if any(leaf.startswith(f"{key}.") for leaf in args.leaves)}  # of a part not read
    every = {key: leaf for key, leaf in every.items() if key not in whole} | dict(args.leaves)
    order = {key: i for i, key in enumerate(release.fields(schema.ROOT))}
    ordered = dict(sorted(every.items(), key=lambda item: order.get(item[0].partition(".")[0], len(order))))
    return Described(f"TensorRT-LLM {release.title}, {args.profile.source}", args.leaves, ordered, args.notes)


def _own(given: Sequence[Source], release: ApiManifest) -> Source:
    """What the adapter wants unless somebody says otherwise."""
    values: dict[str, Any] = {"enable_iter_perf_stats": True}  # KV use on /metrics; an engine that stands still
    samplers = ("enable_trtllm_sampler", "enable_mixed_sampler")
    is_chosen = any(layer.values.get(name) for layer in given for name in samplers)
    if release.presence(schema.ROOT, samplers[0]) is Presence.PRESENT and not is_chosen:
        values[samplers[0]] = True  # 1.0 decodes greedily without
    return Source(values, _ADAPTER)


def _without_postprocessing(leaves: dict[str, Sourced], notes: list[str]) -> None:
    """Those workers replace the results whose tokens and hand-off parameters the adapter reads."""
    leaf = leaves.get("num_postprocess_workers")
    if leaf is not None and leaf.value:
        notes.append(f"num_postprocess_workers {leaf.value} of {leaf.source} is set to 0: nothing is detokenized here")
        leaves["num_postprocess_workers"] = Sourced(0, _ADAPTER)


def _translated(layer: Source, notes: list[str]) -> Source:
    values, said = translate(layer.values, layer.source)
    notes += said
    for key, cure in _OURS.items():
        if key in values:
            raise ConfigError(f"{layer.source}: {key} is {values[key]!r}: {cure}", field=key)
    return layer._replace(values=values)


def _is_mxfp4(model_path: str) -> bool:
    """What the profiles' MoE back ends are for; other models' experts run on the release's own choice.

    Yes where no model can be read: nothing is loaded then, and it is what the profiles were made for.
    """
    try:
        return read_checkpoint(Path(model_path)).quantization == "mxfp4"
    except ConfigError:
        return True


def _advice(wanted: Mapping[str, Sourced], given: Sequence[Source], release: ApiManifest, notes: list[str]) -> Source:
    """A profile's arguments, without those that the release can't take or that somebody decided another way."""
    decided = layers.merge(given).leaves
    kept: dict[str, Sourced] = {}
    source = next((leaf.source for leaf in wanted.values()), "")
    for key, leaf in wanted.items():
        if schema.find(release, key).presence is Presence.ABSENT and schema.is_known(key):
            notes.append(f"{source}: {key} is left out, TensorRT-LLM {release.title} has no such argument")
            continue
        try:
            schema.check(layers.nested({key: leaf}), release, source)
        except ConfigError as exc:
            if not schema.is_known(key):
                raise
            if key not in decided:
                notes.append(f"{exc.message}; left out")
            continue
        if _EITHER.get(key) not in decided:
            kept[key] = leaf
    return Source(layers.nested(kept), source, yields=True)


def _unchecked(found: schema.Unverified, release: ApiManifest) -> str:
    seen = f" (it is {found.note})" if found.note else ""
    return f"{found.key} is passed on unchecked: not read for TensorRT-LLM {release.title}{seen}"
