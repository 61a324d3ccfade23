"""Real vLLM engines of tests, on GPUs or on this CPU: models, pairs of a prefill and a decode
engine, failed reads.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.engines.vllm import transfer_params as wire
from dynamo_trtllm.protocol.errors import TransferFailed
from dynamo_trtllm.protocol.messages import KvTransferParams, Phase, ReleaseOutcome, Role, token_ids
from dynamo_trtllm.support.network.addresses import free_ports
from dynamo_trtllm.testing.engine_requests import ask, check_nothing_left, collect, release, tokens
from tests.kit.engines import answer, prefill_params
from tests.kit.tiny_models import save_tiny_llama

ROOT = Path(__file__).parents[2]
ARGUMENTS = {"enforce_eager": True, "max_num_seqs": 8, "max_model_len": 2048, "seed": 0}
VOCABULARY = 2048
FIRST_BYTE = 10
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Pair(NamedTuple):
    prefill: Engine
    decode: Engine


SPOILED = ("dead port", "blocks out of range")


def spoiled(kv_params: KvTransferParams, how: str, peer: str) -> KvTransferParams:
    """A transfer whose KV can't be read.

    `peer`: of a dead port, the engine that is said to listen there.
    """
    params = dict(wire.unpack(kv_params).kv_transfer_params)
    if how == "dead port":
        params |= {
            "remote_engine_id": peer,
            "remote_host": "127.0.0.1",
            "remote_port": free_ports(1, "127.0.0.1"),
        }
    else:
        params |= {
            "remote_block_ids": [
                [block + 10**6 for block in group] for group in params["remote_block_ids"]
            ]
        }
    return msgspec.structs.replace(
        kv_params, engine_state=wire.pack(params, release="any", seed=None)
    )


async def failed_reads(
    prefill: Engine, decode: Engine, prompts: Sequence[array[int]], how: str
) -> list[str]:
    """What is wrong after the KV of all prompts could not be read, at once: how each call ended,
    what the decode engine
    answers to the same prompt afterwards and from which cache, and what the good transfer still
    gives.
    """
    peer = secrets.token_hex(8)
    # else some first token ends the answer, and there is no transfer
    free: dict[str, Any] = {"ignore_eos": True}

    async def read(n: int, prompt: array[int]) -> list[str]:
        wrong = []
        kv_params = await prefill_params(prefill, prompt, **free)
        try:
            chunks = await collect(
                decode,
                ask(prompt, phase=Phase.DECODE, kv_params=spoiled(kv_params, how, peer), **free),
            )
            wrong.append(f"{len(prompt)} tokens: answered {tokens(chunks)}")
        except TransferFailed:
            pass
        call = (
            ask(prompt, phase=Phase.DECODE, kv_params=kv_params, **free)
            if n % 2
            else ask(prompt, **free)
        )
        chunks = await collect(decode, call)
        release(prefill, kv_params, ReleaseOutcome.FETCHED if n % 2 else ReleaseOutcome.ABORTED)
        stats = chunks[-1].stats
        expected = await answer(prefill, prompt, **free)
        if tokens(chunks) != expected or stats is None or stats.cached_tokens:
            wrong.append(
                f"{len(prompt)} tokens, asked again: {tokens(chunks)} instead of {expected},"
                f" {stats}"
            )
        return wrong

    found = await asyncio.gather(*(read(n, prompt) for n, prompt in enumerate(prompts)))
    return [finding for wrong in found for finding in wrong]


async def all_failed_reads(pair: Pair, count: int, how: str) -> list[str]:
    """As `failed_reads`, of `count` prompts of 30 to 530 tokens, at most 25 at once, and that
    nothing is held then.
    """
    wrong: list[str] = []
    prompts = [
        token_ids(random.choices(range(10, 2000), k=30 + 37 * n % 500)) for n in range(count)
    ]
    for n in range(0, count, 25):
        wrong += await failed_reads(pair.prefill, pair.decode, prompts[n : n + 25], how)
    for engine in pair:
        await check_nothing_left(engine)
    return wrong


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def save_model(folder: Path) -> Path:
    """Full attention, wide enough that answers vary, with a head size that vLLM's CPU attention
    takes.
    """
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
    }
    return save_tiny_llama(folder, head_dim=32, **sizes)


def save_byte_tokenizer(folder: Path) -> Path:
    """Save a tokenizer with one token for each byte, from `FIRST_BYTE` on.

    Structured output needs one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*(f"<{n}>" for n in range(FIRST_BYTE)), *letters]
    names += [f"<{n}>" for n in range(len(names), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<1>", pad_token="<0>"
    ).save_pretrained(folder)
    return folder


def save_windowed(folder: Path, *, window: int) -> Path:
    """Save a model in which every other layer sees so many tokens only, as in gpt-oss."""
    save_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_arguments(**more: Any) -> dict[str, Any]:
    """Return vLLM's arguments for an engine of a test."""
    shares = {"gpu_memory_utilization": 0.3} if _gpus() else {"dtype": "float32"}
    return ARGUMENTS | shares | more


def engine_of(folder: Path, role: Role, *, publish_kv_events: bool = False, **more: Any) -> Engine:
    """Create an engine. `more` are arguments of vLLM."""
    from dynamo_trtllm.engines.vllm.engine import VllmEngine

    config = WorkerConfig(
        model_path=str(folder),
        served_model_name="tiny",
        disaggregation_mode=role,
        publish_kv_events=publish_kv_events,
        override_engine_args=engine_arguments(**more),
    )
    return VllmEngine(config, instance_id=list(Role).index(role) + 1)


@contextmanager
def vllm_environment() -> Iterator[pytest.MonkeyPatch]:
    """Set the environment of vLLM's processes. Yields what undoes further changes at the end."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(ROOT / "tests" / "vllm_on_cpu"), prepend=os.pathsep)
    if not _gpus():
        for name, value in CPU.items():
            patch.setenv(name, value)
    try:
        yield patch
    finally:
        patch.undo()


@asynccontextmanager
async def started(folder: Path, **more: Any) -> AsyncIterator[Pair]:
    with vllm_environment():
        engines = Pair(*(engine_of(folder, role, **more) for role in (Role.PREFILL, Role.DECODE)))
        try:
            for engine in engines:
                await engine.start()
            yield engines
        finally:
            for engine in engines:
                await engine.aclose()
