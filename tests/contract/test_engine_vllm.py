"""What the vllm engine promises beyond the contract, over a stand-in of vLLM that keeps its books
and computes nothing.

The same calls run over the real package in test_engine_vllm_real.py.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import msgspec
import pytest

from dynamo_trtllm.engines.engine_interface import Engine
from dynamo_trtllm.kv_transfer.guard import TransferGuard
from dynamo_trtllm.kv_transfer.prefill_addresses import PrefillAddresses
from dynamo_trtllm.protocol.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    RequestRejected,
    TransferFailed,
    TransferMismatch,
    TransferRejected,
    TransferTimeout,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    OutputFormat,
    Phase,
    ReleaseOutcome,
    Role,
    StructuredOutput,
)
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.testing.engine_requests import (
    ask,
    cancel_after,
    check_nothing_left,
    check_stats,
    collect,
    prompt_of,
    release,
    started,
    tokens,
)
from tests.contract.vllm_real import SPOILED, failed_reads
from tests.kit.engines import answer, error_code, make, prefill_params, prefill_then_decode
from tests.kit.fake_packages import VLLM_RELEASES, fake_vllm
from tests.kit.instances import make_instance

PROMPT = prompt_of(70)
FULL = prompt_of(64)  # fills its last KV block
FORM = StructuredOutput(alternatives=(OutputFormat(json_schema='{"type": "object"}'),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's JSON files: the stand-in needs no weights."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 2048,
        "max_position_embeddings": 8192,
        "eos_token_id": [1, 2],
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")  # so that forms are taken
    return tmp_path


class Engines(NamedTuple):
    aggregated: Engine
    prefill: Engine
    decode: Engine


@pytest.fixture(params=VLLM_RELEASES)
async def engines(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    with fake_vllm(request.param):
        made = Engines(
            *(make("vllm", folder, role) for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE))
        )
        async with started(*made):
            yield made


def core_of(engine: Engine) -> Any:
    """The stand-in's engine process, behind the adapter's back."""
    return engine._llm.core  # type: ignore[attr-defined]


@pytest.mark.parametrize("phase", [Phase.AGGREGATED, Phase.PREFILL])
async def test_prompt_logprobs_come_in_pieces_before_first_token(
    engines: Engines, phase: Phase
) -> None:
    engine = engines.prefill if phase is Phase.PREFILL else engines.aggregated
    prompt = prompt_of(1500)
    chunks = await collect(
        engine, ask(prompt, phase=phase, prompt_logprobs=1, logprobs=1, max_tokens=2)
    )
    if chunks[-1].kv_params is not None:
        release(engine, chunks[-1].kv_params)
    assert [len(chunk.prompt_logprobs) for chunk in chunks][:3] == [1024, 476, 0]
    first, *rest = [entry for chunk in chunks for entry in chunk.prompt_logprobs]
    assert (first.token_id, math.isnan(first.logprob)) == (prompt[0], True)
    assert [(entry.token_id, entry.logprob, len(entry.top)) for entry in rest] == [
        (token, -0.5, 1) for token in prompt[1:]
    ]


async def test_decode_call_connects_to_registered_addresses_only(engines: Engines) -> None:
    kv_params = await prefill_params(engines.prefill, PROMPT)
    addresses = PrefillAddresses(stay_s=9, wait_s=0)
    prefill = make_instance(kv_params.prefill_instance_id, role=Role.PREFILL)
    addresses.add(msgspec.structs.replace(prefill, kv_addresses=("10.0.0.1:5600",)))
    engines.decode.library.guard = TransferGuard(addresses=addresses)  # type: ignore[attr-defined]
    with pytest.raises(TransferRejected, match="not a registered address"):
        await collect(engines.decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
    release(engines.prefill, kv_params)


def logprobs(chunks: list[Chunk]) -> list[int]:
    return [entry.token_id for chunk in chunks for entry in chunk.logprobs]


@pytest.mark.parametrize("prompt", [PROMPT, FULL], ids=["part of a block", "whole blocks"])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "seed": 7},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.2},
        {"guided": FORM},
        {"logit_bias": ((1, 100.0),), "min_tokens": 4},
    ],
    ids=["greedy", "seed", "penalty", "repetition", "form", "min_tokens"],
)
async def test_two_calls_with_any_sampling_equal_aggregated(
    engines: Engines, prompt: Any, sampling: dict[str, Any]
) -> None:
    chosen = {"logprobs": 2, "max_tokens": 12, **sampling}
    aggregated = await collect(engines.aggregated, ask(prompt, **chosen))
    chunks = await prefill_then_decode(engines.prefill, engines.decode, prompt, **chosen)
    assert tokens(chunks) == tokens(aggregated)
    assert logprobs(chunks) == tokens(chunks)
    assert chunks[-1].finish_reason is aggregated[-1].finish_reason
    for engine in engines:
        await check_nothing_left(engine)


async def test_two_calls_without_seed_begin_with_transferred_token(engines: Engines) -> None:
    for prompt in (PROMPT, FULL):
        kv_params = await prefill_params(engines.prefill, prompt, temperature=1.0)
        chunks = await collect(
            engines.decode, ask(prompt, phase=Phase.DECODE, kv_params=kv_params, temperature=1.0)
        )
        release(engines.prefill, kv_params, ReleaseOutcome.FETCHED)
        assert tokens(chunks)[0] == kv_params.first_token_ids[0]
        assert len(tokens(chunks)) == 8


async def test_prefill_frees_kv_when_first_token_ends_the_answer(engines: Engines) -> None:
    stop = (await answer(engines.aggregated, PROMPT))[0]
    request = ask(PROMPT, phase=Phase.PREFILL, stop_token_ids=(stop,))
    (last,) = await collect(engines.prefill, request)
    assert (last.finish_reason, tokens([last]), last.kv_params) == (FinishReason.STOP, [stop], None)
    await check_nothing_left(engines.prefill)
    assert core_of(engines.prefill).leases == {}


async def test_release_when_rejected_then_kv_is_freed_before_its_lease(engines: Engines) -> None:
    kv_params = await prefill_params(engines.prefill, PROMPT)
    await check_stats(
        engines.prefill, pending_kv_transfers=1, pending_kv_blocks=3, kv_blocks_used=3
    )
    release(engines.prefill, kv_params)
    await check_nothing_left(engines.prefill)
    assert core_of(engines.prefill).leases == {}


async def test_prefill_cancelled_at_any_moment_leaves_nothing(engines: Engines) -> None:
    for turns in range(12):
        await cancel_after(engines.prefill, ask(PROMPT, phase=Phase.PREFILL), turns)
    await check_nothing_left(engines.prefill)
    assert core_of(engines.prefill).leases == {}


async def test_decode_when_kv_does_not_come_then_transfer_timeout(folder: Path) -> None:
    with fake_vllm():
        prefill = make("vllm", folder, Role.PREFILL, ttl_s=0.3)
        decode = make("vllm", folder, Role.DECODE)
        async with started(prefill, decode):
            kv_params = await prefill_params(prefill, PROMPT)
            core_of(decode).stuck = True
            began = time.monotonic()
            with pytest.raises(TransferTimeout, match="before it expired"):
                await collect(decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
            assert time.monotonic() - began < 10
            await check_nothing_left(decode)
            await check_nothing_left(prefill)


async def test_decode_when_prefill_engine_is_gone_then_transfer_failed(engines: Engines) -> None:
    kv_params = await prefill_params(engines.prefill, PROMPT)
    core_of(engines.prefill).die()
    with pytest.raises(TransferFailed):
        await collect(engines.decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
    await check_nothing_left(engines.decode)


async def test_timings_of_vllm_divide_the_call(engines: Engines) -> None:
    aggregated = (await collect(engines.aggregated, ask(PROMPT)))[-1].stats
    decode = (await prefill_then_decode(engines.prefill, engines.decode, PROMPT))[-1].stats
    assert aggregated is not None
    assert decode is not None
    assert min(aggregated.queue_s, aggregated.prefill_s, aggregated.more["submit"]) > 0
    assert min(decode.kv_transfer_s, decode.more["first_token"], decode.more["submit"]) > 0


async def test_decode_ignores_kv_that_comes_after_expiry(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the engine process knows: what ends late reads in the worker's process may be late,
    too.
    """
    kv_params = await prefill_params(engines.prefill, PROMPT)
    clock = SimpleNamespace(time=lambda: kv_params.expires_at, monotonic=time.monotonic)
    monkeypatch.setattr("dynamo_trtllm.engines.vllm.patches.late_reads.time", clock)
    with pytest.raises(TransferFailed):
        await collect(engines.decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
    again = (await collect(engines.decode, ask(PROMPT)))[-1]
    assert again.stats is not None
    assert again.stats.cached_tokens == 0
    release(engines.prefill, kv_params)
    await check_nothing_left(engines.decode)


async def test_decode_last_chunk_has_the_parts_of_the_wait(engines: Engines) -> None:
    kv_params = await prefill_params(engines.prefill, PROMPT)
    chunks = await collect(engines.decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
    stats = chunks[-1].stats
    assert stats is not None
    parts = [stats.more[f"kv_transfer.{part}"] for part in ("queue", "post", "read", "notice")]
    assert all(part >= 0 for part in parts)
    assert 0 < sum(parts) <= stats.kv_transfer_s


@pytest.mark.parametrize("how", SPOILED)
async def test_decode_when_kv_is_unreadable_then_caches_nothing(engines: Engines, how: str) -> None:
    """Without the connector's own report of failed reads the stand-in answers with other tokens, as
    vLLM does.
    """
    assert await failed_reads(engines.prefill, engines.decode, [PROMPT, FULL], how) == []
    for engine in engines:
        await check_nothing_left(engine)


async def test_generate_when_the_deadline_passes_then_aborted(engines: Engines) -> None:
    request = msgspec.structs.replace(ask(PROMPT, max_tokens=4000), deadline=time.time() + 0.1)
    with pytest.raises(DeadlineExceeded):
        await collect(engines.aggregated, request)
    await check_nothing_left(engines.aggregated)


async def test_dead_engine_process_fails_streams_and_check(engines: Engines) -> None:
    async def first_then_rest(n: int) -> None:
        async with aclosing(
            as_stream(engines.aggregated, ask(prompt_of(20, n), max_tokens=5000))
        ) as stream:
            await anext(stream)
            begun.release()
            async for _ in stream:
                pass

    begun = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(first_then_rest(n)) for n in range(3)]
    for _ in tasks:
        await begun.acquire()
    core_of(engines.aggregated).die()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EngineFailed] * 3
    with pytest.raises(EngineFailed, match="died"):
        await engines.aggregated.check()
    with pytest.raises(EngineFailed):
        await answer(engines.aggregated, PROMPT)


async def test_adapter_bug_is_internal_but_value_error_is_a_rejection(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = "dynamo_trtllm.engines.vllm"
    theirs = "vllm.sampling_params.SamplingParams.__init__"
    bugs = [
        (f"{ours}.{p}", "internal")
        for p in ("library.VllmRequest", "bindings.VllmBindings.arguments", "library.VllmCall.read")
    ]
    for (place, code), error in [
        *product(bugs, (ValueError, AttributeError)),
        ((theirs, "engine_rejected"), ValueError),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(place, Mock(side_effect=error("wrong")))
            assert await error_code(engines.aggregated, ask(PROMPT)) == code
        await engines.aggregated.check()
        await check_nothing_left(engines.aggregated)

    async def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("wrong")

    with monkeypatch.context() as patch:
        patch.setattr("vllm.v1.engine.async_llm.AsyncLLM.add_request", refuse)
        assert await error_code(engines.aggregated, ask(PROMPT)) == "engine_rejected"
    assert len(await answer(engines.aggregated, PROMPT)) == 8


async def test_close_when_streams_run_then_they_end_in_engine_failed(folder: Path) -> None:
    with fake_vllm():
        engine = make("vllm", folder, Role.AGGREGATED)
        await engine.start()
        stream = as_stream(engine, ask(PROMPT, max_tokens=5000))
        await anext(stream)
        await engine.aclose()
        with pytest.raises(EngineFailed, match="closed"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"engine": "torch"}, "engine"),
        ({"kv_compat": {"release": "0.23.0"}}, "attention_backend"),
        ({"prompt_tokens": 3}, "prompt_tokens"),
        ({"engine_state": b"x"}, "opaque"),
    ],
)
async def test_decode_rejects_transfer_of_another_by_field(
    engines: Engines, change: dict[str, Any], field: str
) -> None:
    kv_params = await prefill_params(engines.prefill, PROMPT)
    changed = msgspec.structs.replace(kv_params, **change)
    with pytest.raises(TransferMismatch) as caught:
        await collect(engines.decode, ask(PROMPT, phase=Phase.DECODE, kv_params=changed))
    assert caught.value.field == field
    release(engines.prefill, kv_params)


async def test_info_when_started_then_what_vllm_settled(engines: Engines, folder: Path) -> None:
    with fake_vllm():
        engine = make("vllm", folder, Role.DECODE, max_seq_len=512, max_batch_size=9)
        try:
            info = await engine.start()
        finally:
            await engine.aclose()
    assert (info.context_length, info.limits.max_batch_size, info.limits.kv_blocks) == (
        512,
        9,
        1001,
    )
    # vLLM's default for servers, not its general one of 2,048
    assert info.limits.max_num_tokens == 8192
    assert info.kv_compat["model_folder"] == str(folder)
    assert "guided" not in info.unsupported_features
    assert info.eos_token_ids == (1, 2)


async def test_start_with_chosen_ports_has_stable_compilation_key(folder: Path) -> None:
    seen = []
    ports = set()
    with fake_vllm():
        for _ in range(3):
            engine = make("vllm", folder, Role.PREFILL)
            async with started(engine):
                seen.append(
                    {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
                )
                ports.add(core_of(engine).connector.connector_scheduler.side_channel_port)
    assert seen[0] == seen[1] == seen[2]
    assert len(ports) > 1


async def test_generate_without_tokenizer_rejects_output_forms(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with fake_vllm():
        engine = make("vllm", folder, Role.AGGREGATED)
        async with started(engine):
            with pytest.raises(RequestRejected) as caught:
                await answer(engine, PROMPT, guided=FORM)
            assert caught.value.field == "guided"
            assert engine.stats().running == 0


async def test_start_when_vllm_refuses_the_arguments_then_config_error(folder: Path) -> None:
    with fake_vllm():
        engine = make("vllm", folder, Role.AGGREGATED, max_seq_len=10**6)
        with pytest.raises(
            ConfigError, match="rejects the engine arguments: User-specified max_model_len"
        ):
            await engine.start()
        await engine.aclose()
