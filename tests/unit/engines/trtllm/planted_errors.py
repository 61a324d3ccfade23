"""Arguments of pairs and workers with one planted error each, by the rule that must find it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dynamo_trtllm.engines.trtllm.preflight.facts import Load
from tests.unit.engines.trtllm.preflight_pairs import GPT_OSS, LLAMA, LOAD

T = "cache_transceiver_config."
K = "kv_cache_config."
V2 = "use_kv_cache_manager_v2"
BEAMS = {"max_beam_width": 4}
PYTHON = {
    T + "backend": "NIXL",
    T + "transceiver_runtime": "PYTHON",
    T + "max_tokens_in_buffer": ...,
}
SPECULATIVE = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 4}}


@dataclass(frozen=True)
class Planted:
    """A change of the facts, and the rule that must report it."""

    rule: str
    severity: str
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)  # of both roles' facts
    known_decode: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        changed = {**self.both, **self.prefill, **self.decode, **self.known, **self.known_decode}
        return f"{self.rule}-{'-'.join(changed)}"


ERRORS = [
    Planted("buffer-block-multiple", "error", both={T + "max_tokens_in_buffer": 9000}),
    Planted("buffer-block-multiple", "error", both={K + "tokens_per_block": 100}),
    Planted("prompt-over-buffer", "error", both={T + "max_tokens_in_buffer": 4096}),
    Planted(
        "prompt-over-buffer",
        "error",
        both={T + "max_tokens_in_buffer": 4096, T + "backend": "NIXL"},
    ),
    Planted("prompt-over-num-tokens", "error", prefill={"max_num_tokens": 8000}),
    Planted("request-over-seq-len", "error", decode={"max_seq_len": 9200}),
    Planted("request-over-seq-len", "error", prefill={"max_seq_len": 8192}),
    Planted("seq-len-over-model", "error", decode={"max_seq_len": 140_000}),
    Planted("expert-parallel-divides", "error", decode={"moe_expert_parallel_size": 3}),
    Planted(
        "moe-split", "error", decode={"moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 4}
    ),
    Planted("tensor-parallel-heads", "error", decode={"tensor_parallel_size": 6}),
    Planted("gpt-oss-pipeline", "error", decode={"pipeline_parallel_size": 2}),
    Planted(
        "experts-with-context-parallel",
        "error",
        decode={"moe_expert_parallel_size": 4, "context_parallel_size": 2},
    ),
    Planted("transceiver-missing", "error", decode={T + "backend": None}),
    Planted(
        "transceiver-missing",
        "error",
        prefill={T + "backend": ..., T + "max_tokens_in_buffer": ...},
    ),
    Planted("overlap-on-prefill", "error", prefill={"disable_overlap_scheduler": False}),
    Planted(
        "overlap-on-prefill",
        "error",
        prefill={"disable_overlap_scheduler": ...},
        known={"release": "1.1.0"},
    ),
    Planted("beam-width", "error", decode={"max_beam_width": 4}),
    Planted(
        "block-size-power-of-two",
        "error",
        both={K + "tokens_per_block": 48, T + "max_tokens_in_buffer": 9600},
    ),
    Planted("encode-only", "error", decode={"mm_encoder_only": True}),
    Planted(
        "waiting-queue-policy",
        "error",
        decode={"scheduler_config.waiting_queue_policy": "prio"},
        known={"release": "1.3.0rc29"},
    ),
    Planted(
        "inflight-cancel-transceiver",
        "error",
        known={
            "release": "1.3.0rc27",
            "environment": {"TRTLLM_DISAGG_ENABLE_INFLIGHT_CANCEL": "1"},
        },
    ),
    Planted(
        "context-parallel-python-transceiver",
        "error",
        both={T + "backend": "NIXL"},
        prefill={"context_parallel_size": 2},
        known={"release": "1.3.0rc27"},
    ),
    Planted("attention-backend-sinks", "error", both={"attn_backend": "FLASHINFER"}),
    Planted("attention-backend-sinks", "error", both={"attn_backend": "trtllm"}),
    Planted("attention-backend-sinks", "error", both={"attn_backend": ""}),
    Planted(
        "prefill-retries",
        "error",
        known={"environment": {"TRTLLM_ENABLE_CONTEXT_FIRST_NO_RETRY_KV_TRANSFER_RETIREMENT": "1"}},
    ),
    Planted(
        "chunked-reuse-corruption",
        "error",
        prefill={"enable_chunked_prefill": True, K + "enable_block_reuse": True},
        known={"release": "1.2.0"},
    ),
    Planted("logits-processor-disaggregated", "error", decode={"batched_logits_processor": {}}),
    Planted(
        "pipelined-transfer",
        "error",
        both={T + "enable_pipelined_transfer": True},
        known={"release": "1.3.0rc27"},
    ),
    Planted("ray-without-ray", "error", decode={"ray_worker_extension_cls": "mine.Extension"}),
    Planted("moe-backend-bias", "error", decode={"moe_config.backend": "DEEPGEMM"}),
    Planted(
        "moe-quantization-gpu",
        "error",
        both={"moe_config.backend": "TRITON"},
        known={"on": "rtx-pro-6000"},
    ),
    Planted(
        "moe-quantization-gpu",
        "error",
        both={"moe_config.backend": "CUTLASS"},
        known={"on": "l40s"},
    ),
    Planted(
        "moe-quantization-gpu",
        "error",
        both={
            "moe_config.backend": "CUTLASS",
            "env_overrides.OVERRIDE_QUANT_ALGO": "W4A8_MXFP4_MXFP8",
        },
        known={"on": "h200"},
    ),
    Planted(
        "moe-quantization-gpu",
        "error",
        both={"moe_config.backend": "CUTLASS"},
        known={"on": "gb200", "environment": {"OVERRIDE_QUANT_ALGO": "W4A16_MXFP4"}},
    ),
    Planted(
        "triton-expert-parallel",
        "error",
        decode={"moe_config.backend": "TRITON", "moe_expert_parallel_size": 4},
    ),
    Planted("kv-dtype-gpu", "error", known={"on": "a100"}),
    Planted(
        "kv-dtype-gpu",
        "error",
        both={K + "dtype": "nvfp4"},
        known={"on": "h200", "release": "1.3.0rc27"},
    ),
    Planted("weights-over-memory", "error", known={"on": "rtx-5090"}),
    Planted("ucx-without-cuda", "error", known={"environment": {"UCX_TLS": "tcp,self"}}),
    Planted("ucx-without-cuda", "error", both={"env_overrides.UCX_TLS": "tcp"}),
    Planted("model-equal", "error", known_decode={"model": LLAMA}),
    Planted("strategy-equal", "error", known_decode={"strategy": "decode_first"}),
    Planted("transceiver-equal", "error", decode={T + "backend": "NIXL"}),
    Planted("transceiver-equal", "error", decode={T + "backend": "DEFAULT"}),
    Planted(
        "transceiver-runtime-equal",
        "error",
        both={T + "backend": "NIXL"},
        decode={T + "transceiver_runtime": "CPP"},
        known={"release": "1.3.0rc27"},
    ),
    Planted(
        "transceiver-runtime-backend",
        "error",
        both={T + "transceiver_runtime": "PYTHON"},
        known={"release": "1.3.0rc27"},
    ),
    Planted(
        "transceiver-runtime-backend",
        "error",
        both={T + "backend": "DEFAULT", T + "transceiver_runtime": "PYTHON"},
        known={"release": "1.3.0rc27", "environment": {"TRTLLM_USE_UCX_KVCACHE": "1"}},
    ),
    Planted(
        "python-transceiver-timeout",
        "error",
        both={**PYTHON, T + "kv_transfer_timeout_ms": None},
        known={"release": "1.3.0rc27"},
    ),
    Planted(
        "build-equal",
        "error",
        both={T + "backend": "NIXL"},
        known={"release": "1.3.0rc27"},
        known_decode={"release": "1.3.0rc29"},
    ),
    Planted("kv-dtype-equal", "error", decode={K + "dtype": "auto"}),
    Planted("block-size-equal", "error", decode={K + "tokens_per_block": 64}),
    Planted("attention-backend-equal", "error", decode={"attn_backend": "FLASHINFER"}),
    Planted("parallel-needs-trtllm-attention", "error", both={"attn_backend": "FLASHINFER"}),
    Planted(
        "parallel-needs-trtllm-attention",
        "error",
        both={"attn_backend": "FLASHINFER", "tensor_parallel_size": 4},
        decode={"enable_attention_dp": True},
    ),
    Planted("seq-len-order", "error", prefill={"max_seq_len": 12000}),
    Planted("seq-len-order", "error", prefill={"max_seq_len": ...}),
    Planted("attention-window-equal", "error", decode={K + "max_attention_window": [128, 11000]}),
    Planted("speculative-equal", "error", decode=SPECULATIVE),
    Planted(
        "speculative-equal",
        "error",
        prefill=SPECULATIVE,
        both=PYTHON,
        known={"release": "1.3.0rc27"},
    ),
    Planted("unfetched-kv-leaks", "error", known={"release": "1.1.0"}),
]
WARNINGS = [
    Planted(
        "argument-removed",
        "warning",
        decode={"sampler_type": "auto"},
        known={"release": "1.3.0rc13"},
    ),
    Planted(
        "no-memory-for-kv",
        "warning",
        prefill={T + "max_tokens_in_buffer": 2_097_152},
        known={"on": "gb200"},
    ),
    Planted("buffer-unset", "warning", both={T + "max_tokens_in_buffer": ...}),
    Planted(
        "prompt-limit-over-num-tokens",
        "warning",
        prefill={"max_num_tokens": 8192},
        known={"load": Load()},
    ),
    Planted("batch-over-num-tokens", "warning", decode={"max_num_tokens": 1024}),
    Planted(
        "speculative-decode-only",
        "warning",
        both=PYTHON,
        decode=SPECULATIVE,
        known={"release": "1.3.0rc27"},
    ),
    Planted(
        "speculative-differs",
        "warning",
        prefill=SPECULATIVE,
        decode={"speculative_config": {"decoding_type": "NGram", "max_draft_len": 2}},
    ),
    Planted(
        "draft-tokens-over-num-tokens", "warning", both=SPECULATIVE, decode={"max_num_tokens": 6000}
    ),
    Planted(
        "attention-backend-spelling",
        "warning",
        both={"attn_backend": "flashinfer"},
        known={"model": LLAMA},
    ),
    Planted("kv-dtype-unknown", "warning", both={K + "dtype": "FP8"}),
    Planted(
        "kv-dtype-overrides-checkpoint",
        "warning",
        known={"model": replace(GPT_OSS, kv_quantization="nvfp4"), "release": "1.3.0rc29"},
    ),
    Planted(
        "beam-width-python-transceiver",
        "warning",
        both=PYTHON,
        decode=BEAMS,
        known={"release": "1.3.0rc27"},
    ),
    Planted(
        "runtime-auto-candidate",
        "warning",
        both={T + "backend": "NIXL"},
        known={"release": "1.3.0rc20"},
    ),
    Planted(
        "pipeline-parallel-transfer-timeout",
        "warning",
        prefill={"pipeline_parallel_size": 2},
        known={"release": "1.3.0rc27", "model": LLAMA},
    ),
    Planted(
        "helix-python-transceiver",
        "warning",
        both=PYTHON,
        decode={"context_parallel_size": 2, "cp_config": {"cp_type": "HELIX"}},
        known={"release": "1.3.0rc27"},
    ),
    Planted(
        "v2-without-fabric",
        "warning",
        both={**PYTHON, K + V2: True},
        known={"on": "h200", "release": "1.3.0rc24"},
    ),
    Planted(
        "attention-backend-model",
        "warning",
        known={"model": replace(LLAMA, model_type="gemma4"), "release": "1.3.0rc27"},
    ),
    Planted("parallel-over-gpus", "warning", known={"num_gpus": 2}),
    Planted("transceiver-mpi", "warning", both={T + "backend": "MPI"}),
    Planted("transfer-timeout-short", "warning", both={T + "kv_transfer_timeout_ms": 5000}),
    Planted("transfer-timeout-null", "warning", prefill={T + "kv_transfer_timeout_ms": None}),
    Planted(
        "transfer-timeout-null",
        "warning",
        prefill={T + "kv_transfer_timeout_ms": None},
        known={"release": "1.3.0rc27"},
    ),
    Planted(
        "transfer-timeout-short",
        "warning",
        both={
            T + "max_tokens_in_buffer": 122_880,
            "max_seq_len": 131_072,
            "enable_chunked_prefill": True,
        },
        known={"load": replace(LOAD, isl=120_000), "release": "1.3.0rc27"},
    ),
    Planted(
        "variable-wrong-answers", "warning", known={"environment": {"ENABLE_PERFECT_ROUTER": "1"}}
    ),
    Planted(
        "variable-wrong-answers", "warning", decode={"env_overrides.TLLM_OVERRIDE_LAYER_NUM": "2"}
    ),
    Planted(
        "variable-broken-transfer",
        "warning",
        known={"environment": {"TRTLLM_DISAGG_LAYERWISE": "1"}},
    ),
    Planted(
        "variable-waiting-decode",
        "warning",
        known={"environment": {"TRTLLM_DISABLE_KV_CACHE_TRANSFER_OVERLAP": "1"}},
    ),
    Planted(
        "roce-local-subnet", "warning", known={"environment": {"UCX_IB_ROCE_LOCAL_SUBNET": "y"}}
    ),
    Planted(
        "host-offload-corruption",
        "warning",
        decode={K + "host_cache_size": 1 << 30},
        known={"release": "1.1.0"},
    ),
    Planted("lora-disaggregated", "warning", both={"enable_lora": True}),
    Planted("events-without-reuse", "warning", decode={K + "event_buffer_max_size": 1024}),
    Planted(
        "cache-manager-fallback", "warning", both={K + V2: True}, known={"release": "1.3.0rc27"}
    ),
    Planted("dummy-weights", "warning", both={"load_format": "dummy"}),
    Planted("moe-backend-falls-back", "warning", known={"on": "h200"}),
    Planted("moe-backend-falls-back", "warning", known={"on": "rtx-pro-6000"}),
    Planted("moe-backend-falls-back", "warning", both={"moe_config.backend": "CUTEDSL"}),
    Planted(
        "gpt-oss-rtx-blackwell",
        "warning",
        both={"moe_config.backend": "CUTLASS"},
        known={"on": "rtx-pro-6000"},
    ),
    Planted("kv-dtype-unknown", "warning", both={K + "dtype": "int8"}),
    Planted(
        "kv-fp8-hopper", "warning", both={"moe_config.backend": "TRITON"}, known={"on": "h200"}
    ),
    Planted(
        "seq-len-over-kv",
        "warning",
        both={
            "max_seq_len": 131_072,
            "tensor_parallel_size": 1,
            K + "dtype": "auto",
            K + "free_gpu_memory_fraction": 0.2,
        },
        known={"on": "h100"},
    ),
    Planted(
        "load-over-kv", "warning", known={"load": replace(LOAD, isl=100_000, concurrency=1280)}
    ),
    Planted("release-equal", "warning", known_decode={"release": "1.1.0"}),
    Planted(
        "pipeline-to-tensor",
        "warning",
        prefill={"pipeline_parallel_size": 2},
        known={"model": LLAMA},
    ),
    Planted("buffer-differs", "warning", decode={T + "max_tokens_in_buffer": 16384}),
]
NOTES = [
    Planted("graph-over-batch", "note", decode={"cuda_graph_config.max_batch_size": 2048}),
    Planted("graph-over-batch", "note", decode={"cuda_graph_config.batch_sizes": [1, 1281]}),
    Planted(
        "host-offload-chunked",
        "note",
        prefill={K + "host_cache_size": 1 << 30, "enable_chunked_prefill": True},
    ),
    Planted("speculative-disaggregated", "note", both=SPECULATIVE),
    Planted("transfer-timeout-crash", "note", known={"release": "1.3.0rc14"}),
    Planted(
        "bounce-buffer-cpp",
        "note",
        both={T + "kv_cache_bounce_size_mb": 512},
        known={"release": "1.3.0rc27"},
    ),
    Planted(
        "bounce-buffer-unset", "note", both={T + "backend": "NIXL"}, known={"release": "1.3.0rc27"}
    ),
    Planted("kv-heads-copied", "note", decode={"tensor_parallel_size": 16}),
    Planted("attention-dp-unused", "note", decode={"attention_dp_config.enable_balance": True}),
    Planted(
        "attention-dp-balance-prefill",
        "note",
        prefill={
            "attention_dp_config.enable_balance": True,
            "enable_attention_dp": True,
            "tensor_parallel_size": 4,
        },
    ),
    Planted("attention-dp-alone", "note", prefill={"enable_attention_dp": True}),
    Planted("transceiver-default", "note", both={T + "backend": "DEFAULT"}),
    Planted("transfer-timeout-untested", "note", both={T + "kv_transfer_timeout_ms": 600_000}),
    Planted("cpp-transceiver-deprecated", "note", known={"release": "1.3.0rc27"}),
    Planted("reuse-on-prefill", "note", prefill={K + "enable_block_reuse": True}),
    Planted("reuse-with-windows", "note", decode={K + "enable_block_reuse": True}),
    Planted(
        "moe-cutlass-hopper", "note", both={"moe_config.backend": "CUTLASS"}, known={"on": "h200"}
    ),
    Planted("nvlink-domains", "note", known={"environment": {}}),
    Planted("infiniband-loopback", "note", known={"environment": {}, "on": "b200"}),
    Planted(
        "foreign-nixl",
        "note",
        both={T + "backend": "NIXL"},
        known={"environment": {"LD_LIBRARY_PATH": "/usr/lib:/opt/nvidia/nvda_nixl/lib64"}},
    ),
    Planted(
        "triton-deprecated",
        "note",
        both={"moe_config.backend": "TRITON"},
        known={"on": "h200", "release": "1.3.0rc27"},
    ),
    Planted("load-over-batch", "note", known={"load": replace(LOAD, concurrency=4000)}),
]
PLANTED = [*ERRORS, *WARNINGS, *NOTES]
# Found on aggregated workers alone, or only where no profile advises; tested below. The others:
# test_preflight_kv.py.
