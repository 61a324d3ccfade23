"""Creates the engines of this package for tests, and asks a worker's service."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.engines.mock.engine import MockEngine
from dynamo_trtllm.kv_transfer.transfer_backend import TransferBackend
from dynamo_trtllm.observability.metrics import WorkerMetrics
from dynamo_trtllm.protocol.errors import DynamoError
from dynamo_trtllm.protocol.messages import Chunk, GenerateRequest, KvTransferParams, Role
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.testing.engine_requests import ask, collect, prefill, run_both, tokens
from dynamo_trtllm.worker.service import WorkerService
from dynamo_trtllm.worker.worker_admission import WorkerAdmission
from tests.kit.instances import make_instance
from tests.kit.loopback_backend import named_backend

# By folder and arguments, models that engines of this process have loaded.
_LOADED: dict[tuple[str, str], Any] = {}
# TensorRT-LLM frees KV that was not fetched only after a time, which tests wait for
TRTLLM_TTL_S = 2.0


@contextmanager
def models_loaded_once() -> Iterator[None]:
    """Let engines that start in the context share the weights of a model folder: none changes them.

    To load a tiny model takes most of the CPU time of a start.
    """
    from dynamo_trtllm.engines.torch.engine import TorchEngine  # importing torch takes seconds

    load = TorchEngine._load

    def load_once(engine: TorchEngine) -> Any:
        key = (engine._model_path, engine._args.model_dump_json())
        if key not in _LOADED:
            _LOADED[key] = load(engine)
        return _LOADED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "_load", load_once)
        yield


def make(
    kind: str,
    folder: Path,
    role: Role,
    *,
    backend: str | TransferBackend = "loopback",
    ttl_s: float | None = None,
    publish_kv_events: bool = False,
    warm_up_budget_s: float = 0.0,
    **args: Any,
) -> Engine:
    """Create an engine, without the requests that compile kernels, because a CPU has none."""
    if ttl_s is None:
        ttl_s = TRTLLM_TTL_S if kind == "trtllm" else 60.0
    config = WorkerConfig(
        model_path=str(folder),
        served_model_name="tiny",
        disaggregation_mode=role,
        kv_transfer_ttl_s=ttl_s,
        publish_kv_events=publish_kv_events,
        warm_up_budget_s=warm_up_budget_s,
        # named, because else four files are read to choose one by the GPUs
        kernels_profile="fallback" if kind == "trtllm" else None,
        override_engine_args=_ARGUMENTS[kind](role, args) if kind in _ARGUMENTS else args,
    )
    number = list(Role).index(role) + 1
    if kind == "trtllm":  # on the fake TensorRT-LLM, which chooses the transfer backend itself
        from dynamo_trtllm.engines.trtllm.engine import TrtllmEngine

        return TrtllmEngine(config, instance_id=number)
    if kind == "vllm":  # on the fake vLLM
        from dynamo_trtllm.engines.vllm.engine import VllmEngine

        return VllmEngine(config, instance_id=number)
    chosen = named_backend(backend) if isinstance(backend, str) else backend
    if kind == "mock":
        return MockEngine(config, instance_id=number, backend=chosen)
    from dynamo_trtllm.engines.torch.engine import TorchEngine

    return TorchEngine(config, instance_id=number, backend=chosen)


def trtllm_args(role: Role, **args: Any) -> dict[str, Any]:
    """Translate the arguments of the contract tests to TensorRT-LLM's names."""
    kv = dict(args.pop("kv_cache_config", {}))
    if "kv_block_size" in args:
        kv["tokens_per_block"] = args.pop("kv_block_size")
    if "kv_cache_blocks" in args:
        kv["max_tokens"] = args.pop("kv_cache_blocks") * 32
    chosen: dict[str, Any] = {"disable_overlap_scheduler": True} if role is Role.PREFILL else {}
    if role is not Role.AGGREGATED:
        chosen["cache_transceiver_config"] = {
            "backend": args.pop("transceiver", "UCX"),
            "max_tokens_in_buffer": 8192,
        }
    args.pop("transceiver", None)
    return chosen | ({"kv_cache_config": kv} if kv else {}) | args


def vllm_args(args: dict[str, Any]) -> dict[str, Any]:
    """Translate the arguments of the contract tests to vLLM's names."""
    names = {
        "kv_block_size": "block_size",
        "max_batch_size": "max_num_seqs",
        "max_seq_len": "max_model_len",
    }
    chosen = {names.get(name, name): value for name, value in args.items()}
    if "kv_cache_blocks" in chosen:
        chosen["num_gpu_blocks_override"] = chosen.pop("kv_cache_blocks") + 1
    return {"block_size": 32} | chosen


_ARGUMENTS: dict[str, Callable[[Role, dict[str, Any]], dict[str, Any]]] = {
    "trtllm": lambda role, args: trtllm_args(role, **args),
    "vllm": lambda _, args: vllm_args(args),
}


async def answer(engine: Engine, prompt: array[int], **sampling: Any) -> list[int]:
    """Return the tokens of the greedy answer to a prompt."""
    return tokens(await collect(engine, ask(prompt, **sampling)))


async def prefill_params(engine: Engine, prompt: array[int], **sampling: Any) -> KvTransferParams:
    """Run a prefill call, and return its KV transfer parameters."""
    return await prefill(engine, ask(prompt, **sampling))


async def prefill_then_decode(
    prefill_engine: Engine, decode_engine: Engine, prompt: array[int], **sampling: Any
) -> list[Chunk]:
    """Run the prefill and the decode phase like a frontend, and release the KV."""
    return await run_both(prefill_engine, decode_engine, ask(prompt, **sampling))


async def error_code(engine: Engine, request: GenerateRequest) -> str:
    """Return the error code with which a worker with this engine rejects the request."""
    instance = make_instance(1, role=Role.AGGREGATED)
    admission = WorkerAdmission()
    service = WorkerService(engine, instance, admission, files={}, metrics=WorkerMetrics())
    with pytest.raises(DynamoError) as caught:
        async for _ in as_stream(service, request):
            pass
    return caught.value.code
