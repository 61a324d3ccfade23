"""Real vLLM engines of tests, on GPUs or on this CPU: models, and pairs of a prefill and a decode engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engine.base import Engine
from dynamo_trtllm.messages import Role
from tests.tiny_models import save_tiny_llama

ROOT = Path(__file__).parents[2]
ARGUMENTS = {"enforce_eager": True, "max_num_seqs": 8, "max_model_len": 2048, "seed": 0}
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Pair(NamedTuple):
    prefill: Engine
    decode: Engine


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def save_model(folder: Path) -> Path:
    """Full attention, wide enough that answers vary, with a head size that vLLM's CPU attention takes."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 2048, "max_position_embeddings": 4096}
    return save_tiny_llama(folder, head_dim=32, **sizes)


def _engine(folder: Path, role: Role, **more: Any) -> Engine:
    from dynamo_trtllm.engine.vllm.engine import VllmEngine

    shares = {"gpu_memory_utilization": 0.3} if _gpus() else {"dtype": "float32"}
    config = WorkerConfig(
        model_path=str(folder),
        served_model_name="tiny",
        disaggregation_mode=role,
        override_engine_args=ARGUMENTS | shares | more,
    )
    return VllmEngine(config, instance_id=list(Role).index(role) + 1)


@asynccontextmanager
async def started(folder: Path, **more: Any) -> AsyncIterator[Pair]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(ROOT / "tests" / "vllm_on_cpu"), prepend=os.pathsep)
    if not _gpus():
        for name, value in CPU.items():
            patch.setenv(name, value)
    engines = Pair(*(_engine(folder, role, **more) for role in (Role.PREFILL, Role.DECODE)))
    try:
        for engine in engines:
            await engine.start()
        yield engines
    finally:
        for engine in engines:
            await engine.aclose()
        patch.undo()
