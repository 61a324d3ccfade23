"""Creates valid pairs of worker configurations, with changes to single arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dynamo_trtllm.config.layers import SourcedValue, nested
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.gpu import Gpu
from dynamo_trtllm.engines.trtllm.api_manifests import release_for
from dynamo_trtllm.engines.trtllm.args import trtllm_args
from dynamo_trtllm.engines.trtllm.preflight.facts import Load, RoleFacts, known_gpu
from dynamo_trtllm.models.checkpoint import SHAPES
from dynamo_trtllm.protocol.messages import Role

GPT_OSS = SHAPES["gpt-oss-120b"]
LLAMA = replace(
    GPT_OSS,
    model_type="llama",
    num_layers=32,
    num_attention_heads=32,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    sliding_window=None,
    num_sliding_layers=0,
    num_experts=0,
    experts_per_token=0,
    quantization=None,
    attention_bias=False,
)
LOAD = Load(isl=8192, osl=1024, concurrency=512)

_BOTH: dict[str, Any] = {
    "kv_cache_config.dtype": "fp8",
    "kv_cache_config.tokens_per_block": 32,
    "kv_cache_config.enable_block_reuse": False,
    "kv_cache_config.free_gpu_memory_fraction": 0.8,
    "cache_transceiver_config.backend": "UCX",
    "cache_transceiver_config.max_tokens_in_buffer": 9216,
    "moe_config.backend": "TRTLLM",
    "attn_backend": "TRTLLM",
    "max_num_tokens": 20000,
}
_OF_ROLE: dict[Role, dict[str, Any]] = {
    Role.PREFILL: {"disable_overlap_scheduler": True, "max_batch_size": 64, "max_seq_len": 9000},
    Role.DECODE: {"max_batch_size": 1280, "max_seq_len": 11000, "tensor_parallel_size": 4},
    Role.AGGREGATED: {"max_batch_size": 512, "max_seq_len": 11000, "tensor_parallel_size": 4},
}
_TRANSCEIVER = "cache_transceiver_config."


def gpu(name: str) -> Gpu:
    known = known_gpu(name)
    return Gpu(name=known.name, sm=known.sm, memory_bytes=known.memory_bytes)


def facts(
    role: Role,
    changes: dict[str, Any] | None = None,
    *,
    release: str = "1.2.1",
    on: str = "gb200",
    **known: Any,
) -> RoleFacts:
    """Return a valid worker of this role with changed arguments.

    `...` removes one. `known` sets RoleFacts fields.
    """
    good = {**_BOTH, **_OF_ROLE[role]}
    if role is Role.AGGREGATED:
        good = {key: value for key, value in good.items() if not key.startswith(_TRANSCEIVER)}
    wanted = {key: value for key, value in {**good, **(changes or {})}.items() if value is not ...}
    values = nested({key: SourcedValue(value, "test") for key, value in wanted.items()})
    config = WorkerConfig(
        model_path="model", engine="trtllm", disaggregation_mode=role, override_engine_args=values
    )
    environment = {"UCX_CUDA_IPC_ENABLE_MNNVL": "y", "UCX_TLS": "^gdr_copy"}
    given: dict[str, Any] = {
        "model": GPT_OSS,
        "load": LOAD,
        "gpu": gpu(on),
        "environment": environment,
        **known,
    }
    return RoleFacts(
        role=role,
        args=trtllm_args(config, release_for(release), [gpu(on)]),
        release=release,
        **given,
    )
