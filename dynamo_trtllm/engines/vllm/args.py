"""The arguments of `AsyncEngineArgs` from a worker's configuration: YAML < environment < typed flag < override.

Checked against the pinned release before anything loads. Imports no vendor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_trtllm.config import layers
from dynamo_trtllm.config.base import DEFAULT_SOURCE
from dynamo_trtllm.config.layers import Source, Sourced
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.arguments import Described, file_layer, flag_layers, override_layer
from dynamo_trtllm.engines.vllm import manifest
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.messages import Role

# Our flag -> their argument. The number of expert-parallel ranks is no argument of theirs: see `_experts`.
FLAGS: Mapping[str, str] = {
    "load_format": "load_format",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "max_num_tokens": "max_num_batched_tokens",
    "max_batch_size": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "free_gpu_memory_fraction": "gpu_memory_utilization",
    "kv_block_size": "block_size",
}

# Names that people bring along from the other engine, and what they are here.
_RESERVED = {
    "moe_expert_parallel_size": "--expert-parallel-size, or enable_expert_parallel",
    "enable_attention_dp": "data_parallel_size",
    "max_num_tokens": "max_num_batched_tokens",
    "max_batch_size": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "kv_cache_config": "gpu_memory_utilization, block_size, kv_cache_dtype",
    "cuda_graph_config": "cudagraph_capture_sizes, or enforce_eager: true for none",
    "moe_config": "moe_backend",
    "cache_transceiver_config": "nothing: the connector is always NixlConnector",
}

# Arguments that the engine sets itself: a configuration must not.
_OURS = {
    "model": "give --model-path",
    "served_model_name": "give --served-model-name",
    "skip_tokenizer_init": "it is decided by the model's files",
    "disable_log_stats": "statistics go to /metrics of this worker",
    "enable_log_requests": "requests are logged by this worker",
    "stream_interval": "each step of the engine is one chunk",
    "worker_extension_cls": "it is dynamo_trtllm's",
    "kv_events_config": "no engine of this version publishes KV events",
    "kv_transfer_config.kv_connector": "hand-offs are NixlConnector's",
    "kv_transfer_config.kv_connector_module_path": "hand-offs are NixlConnector's",
    "kv_transfer_config.kv_role": "it is kv_both in every role",
    "kv_transfer_config.engine_id": "it is made anew at every start",
    "kv_transfer_config.kv_load_failure_policy": "a hand-off that failed is tried again by the frontend",
    "kv_transfer_config.kv_connector_extra_config.kv_lease_duration": "give --ticket-ttl-s",
    "kv_transfer_config.kv_connector_extra_config.bidirectional_kv_xfer": "KV goes from prefill to decode",
    "kv_transfer_config.kv_connector_extra_config.side_channel_host": "export VLLM_NIXL_SIDE_CHANNEL_HOST",
    "kv_transfer_config.kv_connector_extra_config.side_channel_port": "export VLLM_NIXL_SIDE_CHANNEL_PORT",
}
# What changes how many engines there are, or who talks to them.
_NOT_DRIVEN = (
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_size_local",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_multi_port_external_lb",
    "nnodes",
    "node_rank",
    "enable_elastic_ep",
    "tokens_only",
    "speculative_config",
    "enable_lora",
)
_ADAPTER = "the vllm engine"  # as a source
EXTENSION = "dynamo_trtllm.engines.vllm.extension.WorkerExtension"
CONNECTOR = "dynamo_trtllm.engines.vllm.connector"
_LEASE_SPARE_S = 5  # vLLM's lease outlives the ticket: what frees KV in time is the engine, see `reclaim`
_RANGES: Mapping[str, tuple[float, float | None]] = {
    "tensor_parallel_size": (1, None),
    "pipeline_parallel_size": (1, None),
    "data_parallel_size": (1, None),
    "max_num_batched_tokens": (1, None),
    "max_num_seqs": (1, None),
    "block_size": (1, None),
    "max_model_len": (-1, None),  # -1: as long as fits the memory
    "gpu_memory_utilization": (0.01, 1),
    "max_logprobs": (-1, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmArgs:
    """The merged and checked arguments of one worker."""

    values: Mapping[str, Any]  # nested, for `AsyncEngineArgs(model=..., **values)`
    leaves: Mapping[str, Sourced]  # what was set, by dotted key, with the place that won
    notes: tuple[str, ...]  # lines to log

    def get(self, key: str) -> Any:
        """The value set for a dotted key, else the release's plain default, else None."""
        if key in self.leaves:
            return self.leaves[key].value
        field = manifest.find(key)
        return None if field is None else field.default

    def count(self, key: str) -> int:
        """Of an argument that counts ranks."""
        return int(self.get(key) or 1)


def vllm_args(config: WorkerConfig) -> VllmArgs:
    """Raises ConfigError naming the flag, file or key at fault."""
    if config.kernels_profile is not None:
        raise ConfigError(
            f"{config.source_of('kernels_profile')} {config.kernels_profile}: profiles are of the trtllm engine; "
            "vLLM chooses kernels itself, or takes moe_backend and attention_backend",
            field="kernels_profile",
        )
    given = [file_layer(config), *flag_layers(config, FLAGS), override_layer(config)]
    for layer in given:
        _check(layer)
    merged = layers.merge([_own(config), *given])
    experts = _experts(config, merged.leaves)
    if experts is not None:
        merged.leaves["enable_expert_parallel"] = experts
    notes = [*merged.notes, *_meanings(config)]
    return VllmArgs(values=layers.nested(merged.leaves), leaves=merged.leaves, notes=tuple(notes))


def described(config: WorkerConfig) -> Described:
    """The arguments with the places they come from, defaults included. Raises ConfigError."""
    args = vllm_args(config)
    every: dict[str, Sourced] = {}
    for name, field in manifest.classes()[manifest.ROOT].items():
        set_here = {key: leaf for key, leaf in args.leaves.items() if key == name or key.startswith(f"{name}.")}
        every |= set_here or {name: Sourced(field.default, f"default (vLLM {manifest.VERSION})")}
    return Described(f"vLLM {manifest.VERSION}", args.leaves, every, args.notes)


def _own(config: WorkerConfig) -> Source:
    """What the adapter wants; of these only what is not in _OURS may be said otherwise."""
    values: dict[str, Any] = {"enable_prefix_caching": True, "worker_extension_cls": EXTENSION}
    if config.disaggregation_mode is not Role.AGGREGATED:
        values["kv_transfer_config"] = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": math.ceil(config.ticket_ttl_s) + _LEASE_SPARE_S},
        }
    return Source(values, _ADAPTER)


def _check(layer: Source) -> None:
    leaves = layers.merge([layer]).leaves
    for key in leaves:
        root = key.partition(".")[0]
        if root in _RESERVED and manifest.find(root) is None:
            raise ConfigError(
                f"{layer.source}: {root} is of the trtllm engine; with vLLM it is {_RESERVED[root]}", field=root
            )
    for key, leaf in leaves.items():
        for name, cure in _OURS.items():
            if key == name or key.startswith(f"{name}."):
                raise ConfigError(f"{layer.source}: {key} is {leaf.value!r}: {cure}; leave it out", field=key)
    for name in _NOT_DRIVEN:
        if layer.values.get(name):
            raise ConfigError(
                f"{layer.source}: {name} is {layer.values[name]!r}: this worker drives one engine on one machine, with "
                "neither drafts nor adapters; leave it out",
                field=name,
            )
    manifest.check(layer.values, layer.source)
    for key, (low, high) in _RANGES.items():
        value = leaves[key].value if key in leaves else None
        if value is not None and (value < low or (high is not None and value > high)):
            span = f"{low} to {high}" if high is not None else f"{low} or more"
            raise ConfigError(f"{layer.source}: {key} is {value!r}: expected {span}", field=key)


def _experts(config: WorkerConfig, leaves: Mapping[str, Sourced]) -> Sourced | None:
    """vLLM spreads experts over all ranks or over none."""
    wanted = config.expert_parallel_size
    if wanted is None:
        return None
    source = config.source_of("expert_parallel_size")
    sizes = {key: int(leaves[key].value) if key in leaves else 1 for key in _RANKS}
    ranks = math.prod(sizes.values())
    if wanted not in (1, ranks):
        product = " times ".join(f"{key} {size}" for key, size in sizes.items())
        raise ConfigError(
            f"{source} is {wanted}: vLLM spreads experts over all ranks of a layer, {ranks} ({product}), or over none; "
            f"give {ranks} or 1",
            field="expert_parallel_size",
        )
    set_here = leaves.get("enable_expert_parallel")
    if set_here is not None and set_here.value is not (wanted > 1) and ranks > 1:
        raise ConfigError(
            f"{source} is {wanted}, and enable_expert_parallel of {set_here.source} is {set_here.value}; give one",
            field="expert_parallel_size",
        )
    return Sourced(wanted > 1, source)


_RANKS: Sequence[str] = ("tensor_parallel_size", "data_parallel_size")


def _meanings(config: WorkerConfig) -> list[str]:
    """What a setting means here and nowhere else."""
    notes = []
    if config.disaggregation_mode is Role.DECODE and config.source_of("disaggregation_mode") == DEFAULT_SOURCE:
        notes.append(
            "no role is said: this is a decode worker, as with Dynamo's vLLM; for whole requests in one worker give "
            "--disaggregation-mode prefill_and_decode"
        )
    if config.free_gpu_memory_fraction is not None:
        notes.append(
            f"--free-gpu-memory-fraction {config.free_gpu_memory_fraction:g} is vLLM's gpu_memory_utilization: the "
            "share of all GPU memory that it takes, weights included, not of what is left after them"
        )
    return notes
