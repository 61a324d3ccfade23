"""The TensorRT-LLM files of engine_configs/, with the GPUs, flags and loads that each folder is
for.
"""

from __future__ import annotations

from pathlib import Path

from dynamo_trtllm.config.commands import PreflightConfig

FOLDER = Path(__file__).resolve().parents[4] / "engine_configs"
LAUNCH_PREFILL = "--max-num-tokens 20000 --max-batch-size 32 --free-gpu-memory-fraction 0.9"
LAUNCH_BOTH = " --tensor-parallel-size 4 --expert-parallel-size 4"
LAUNCH_DECODE = "--max-num-tokens 16384 --free-gpu-memory-fraction 0.9"
LAUNCH_AGG = "--max-batch-size 800 --free-gpu-memory-fraction 0.9"
BLACKWELL = ("b200", "gb200", "b300")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}

# folder, GPUs, further flags of prefill and of decode (of the aggregated worker: the first)
SHIPPED: dict[str, tuple[tuple[str, ...], str, str]] = {
    "gpt-oss-120b": (BLACKWELL, LAUNCH_PREFILL + LAUNCH_BOTH, LAUNCH_DECODE + LAUNCH_BOTH),
    "gpt-oss-120b/v0.5": (
        BLACKWELL,
        LAUNCH_PREFILL + LAUNCH_BOTH,
        "--free-gpu-memory-fraction 0.9",
    ),
    "gpt-oss-120b/draft": (BLACKWELL, "", "--max-batch-size 128"),
    "gpt-oss-120b/k8s-disagg": (BLACKWELL, "", ""),
    "gpt-oss-120b/k8s-agg": (BLACKWELL, LAUNCH_AGG + LAUNCH_BOTH, ""),
    "gpt-oss-120b/hopper": (("h100", "h200"), "", ""),
    "gpt-oss-120b/nixl": (BLACKWELL, LAUNCH_PREFILL + LAUNCH_BOTH, LAUNCH_DECODE + LAUNCH_BOTH),
    "gpt-oss-120b/k8s-disagg/nixl": (BLACKWELL, "", ""),
    "gpt-oss-120b/hopper/nixl": (("h100", "h200"), "", ""),
    "gpt-oss-20b/nixl": (("h100", "h200", *BLACKWELL), "", ""),
    "llama-3.1-8b/nixl": (("a100", "l40s", "h100", "h200", *BLACKWELL), "", ""),
    "gpt-oss-20b": (("h100", "h200", *BLACKWELL), "", ""),
    "llama-3.1-8b": (("a100", "l40s", "h100", "h200", *BLACKWELL), "", ""),
}
# What the two Kubernetes targets and the guides say they are for: prompt, answer, concurrency.
LOADS = {
    "gpt-oss-120b": (32000, 256, 256),
    "gpt-oss-120b/v0.5": (32000, 256, 256),
    "gpt-oss-120b/nixl": (32000, 256, 256),
    "gpt-oss-120b/k8s-disagg/nixl": (8192, 1024, 1536),
    "gpt-oss-120b/draft": (1000, 2000, None),
    "gpt-oss-120b/k8s-disagg": (8192, 1024, 1536),
    "gpt-oss-120b/k8s-agg": (128, 1000, 3600),
}


def config(name: str, gpu: str, release: str, model: str) -> PreflightConfig:
    folder = FOLDER / name
    known = {"gpu": gpu, "release": release, "model_path": model}
    _, first, second = SHIPPED[name]
    if (folder / "agg.yaml").exists():
        return PreflightConfig(agg=folder / "agg.yaml", agg_args=first, **known)
    roles = {"prefill": folder / "prefill.yaml", "decode": folder / "decode.yaml"}
    return PreflightConfig(**roles, prefill_args=first, decode_args=second, **known)
