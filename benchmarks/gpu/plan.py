"""Defines which process gets which GPUs and arguments, as entries of the launcher's file.

Each role, and each replica of an aggregated deployment, gets half of the GPUs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from dynamo_trtllm.engines.vllm.args import EXTENSION

Engine = Literal["vllm", "torch", "mock"]
MODEL_NAME = "bench"
AGGREGATED = "prefill_and_decode"
STEP_TOKENS = 8192  # as in engine_configs/vllm and in vLLM's servers on H100 and H200
ELASTIC = "elastic"
_TOPOLOGY = re.compile(r"(?:([1-9]\d*)A|([1-9]\d*)E|([1-9]\d*)P([1-9]\d*)D)(?:@([1-9]\d*))?")
# Disables NVLink multicast, because a program that uses it can leave the GPUs of a shared host
# unusable, and downloads.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "mock": {"step_s": 0.005},
    "torch": {
        "transfer_backend": "tcp",
        "dtype": "float32",
        "max_batch_size": 64,
        "kv_cache_blocks": 1024,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Engine, model and GPUs of a run."""

    engine: Engine
    model: str  # a folder, or the name of a bundled model
    gpus: tuple[int, ...] = ()  # empty: CPU
    first: int | None = None  # number of GPUs of the prefill worker, if not half of them
    layers: int = 0
    is_eager: bool = False
    max_seq_len: int = 40_960
    max_num_tokens: int = STEP_TOKENS
    max_batch_size: int = 256
    gpu_memory_utilization: float = 0.85
    prefix_caching: bool = False
    ready_s: float = 900.0  # a first start compiles
    compile_cache: str | None = None  # folder
    warm_up_budget_s: float | None = None  # None: the workers' default
    extra: dict[str, Any] = field(default_factory=dict)  # further engine arguments

    @property
    def halves(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the GPUs of the first and the second role. With one GPU both share it."""
        if self.first is not None:
            return self.gpus[: self.first], self.gpus[self.first :]
        half = len(self.gpus) // 2
        if not half:
            return self.gpus, self.gpus
        return self.gpus[:half], self.gpus[half : 2 * half]

    @property
    def width(self) -> int:
        """Return the number of GPUs per role."""
        return max(1, len(self.halves[0]))

    def setup(self) -> dict[str, Any]:
        """Return the settings for the result file."""
        return {
            "engine": self.engine,
            "layers": self.layers,
            "gpus": len(self.gpus),
            "tensor_parallel_size": self.width,
            "eager": self.is_eager,
            "max_num_tokens": self.max_num_tokens,
            "engine_arguments": engine_arguments(self),
        }


def engine_arguments(plan: Plan) -> dict[str, Any]:
    """Return the engine arguments, by the names of the engine."""
    if plan.engine != "vllm":
        return _ENGINE_ARGS[plan.engine] | plan.extra
    return {
        "gpu_memory_utilization": plan.gpu_memory_utilization,
        "enable_prefix_caching": plan.prefix_caching,
        "enforce_eager": plan.is_eager,
    } | plan.extra


def flags(plan: Plan, gpus: tuple[int, ...]) -> dict[str, Any]:
    """Return the flags of a worker on these GPUs."""
    found: dict[str, Any] = {
        "model": plan.model,
        "served-model-name": MODEL_NAME,
        "engine": plan.engine,
        "override-engine-args": engine_arguments(plan),
        "system-port": 0,
    }
    if plan.engine == "vllm":
        found |= {
            "load-format": "dummy",
            "max-seq-len": plan.max_seq_len,
            "max-num-tokens": plan.max_num_tokens,
            "max-batch-size": plan.max_batch_size,
        }
        if plan.compile_cache is not None:
            found["compile-cache"] = plan.compile_cache
        if plan.warm_up_budget_s is not None:
            found["warm-up-budget-s"] = plan.warm_up_budget_s
        if len(gpus) > 1:
            found |= {"tensor-parallel-size": len(gpus), "expert-parallel-size": len(gpus)}
    return found


def worker(plan: Plan, name: str, mode: str, gpus: tuple[int, ...]) -> dict[str, Any]:
    """Return an entry for `workers` of the launcher's file."""
    return {
        "name": name,
        "disaggregation_mode": mode,
        "devices": list(gpus) or "cpu",
        "flags": flags(plan, gpus),
        "env": ENVIRONMENT | ({} if gpus else {"OMP_NUM_THREADS": "1"}),
    }


def topology(plan: Plan, word: str) -> list[dict[str, Any]]:
    """Return the workers of a topology: 4A (aggregated), 4E (elastic), 2P2D (prefill and decode),
    2A@2 (two GPUs per worker).

    Raises:
        ValueError: the word is no topology, or it needs more GPUs than there are.
    """
    match = _TOPOLOGY.fullmatch(word)
    if match is None:
        raise ValueError(f"{word} is no topology; write, for example, 4A, 4E, 2P2D, 1P3D or 2A@2")
    aggregated, elastic, prefill, decode, width = (int(count or 0) for count in match.groups())
    roles = ["aggregated"] * aggregated + [ELASTIC] * elastic
    roles += ["prefill"] * prefill + ["decode"] * decode
    width = width or 1
    if plan.gpus and len(roles) * width > len(plan.gpus):
        raise ValueError(f"{word} needs {len(roles) * width} GPUs, but there are {len(plan.gpus)}")
    return [
        worker(
            plan,
            f"{role}-{number}",
            AGGREGATED if role == "aggregated" else role,
            plan.gpus[number * width : (number + 1) * width],
        )
        for number, role in enumerate(roles)
    ]


def disaggregated(plan: Plan) -> list[dict[str, Any]]:
    """Return one prefill and one decode worker."""
    first, second = plan.halves
    return [worker(plan, "prefill", "prefill", first), worker(plan, "decode", "decode", second)]


def replicas(plan: Plan) -> list[dict[str, Any]]:
    """Return two aggregated workers on the same GPUs."""
    return [
        worker(plan, f"aggregated-{n}", AGGREGATED, gpus) for n, gpus in enumerate(plan.halves, 1)
    ]


def single(plan: Plan, half: int) -> list[dict[str, Any]]:
    """Return one aggregated worker on the first (0) or the second (1) half of the GPUs."""
    return [worker(plan, "aggregated-1", AGGREGATED, plan.halves[half])]


def server_arguments(plan: Plan, port: int, width: int) -> list[str]:
    """Return arguments for vLLM's own server, on `width` GPUs, that equal those of our worker's
    engine.
    """
    argv = [
        f"--model={plan.model}",
        f"--served-model-name={MODEL_NAME}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--load-format=dummy",
        f"--max-model-len={plan.max_seq_len}",
        f"--max-num-batched-tokens={plan.max_num_tokens}",
        f"--max-num-seqs={plan.max_batch_size}",
        f"--tensor-parallel-size={width}",
        f"--worker-extension-cls={EXTENSION}",  # creates the same dummy weights as our worker
    ]
    if width > 1:
        argv.append("--enable-expert-parallel")
    for name, value in engine_arguments(plan).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            argv += [f"--{flag}", *map(str, value)]
        else:
            argv.append(f"--{flag}={value}")
    return argv
