"""The torch engine beyond the contract: parity with transformers, of prefill and decode, sampling,
failure.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.engines.torch.engine import TorchEngine
from dynamo_trtllm.engines.torch.sequence import TorchSequence
from dynamo_trtllm.kv_transfer.memory import MemoryRegion
from dynamo_trtllm.protocol.errors import (
    ConfigError,
    EngineFailed,
    RequestRejected,
    TransferFailed,
)
from dynamo_trtllm.protocol.messages import (
    FinishReason,
    Phase,
    Role,
    token_ids,
)
from dynamo_trtllm.protocol.streams import StreamEvent, as_stream
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    collect,
    prompt_of,
    release,
    started,
    tokens,
)
from tests.kit.engines import answer, make, prefill_params, prefill_then_decode
from tests.kit.loopback_backend import LoopbackBackend
from tests.kit.waiting import SOON_S

LENGTHS = [1, 31, 32, 33, 127, 128, 129, 600, 1300]
CHUNK = 512  # tokens of a prefill step: the last two take two and three


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
async def test_greedy_when_compared_with_transformers_then_equal(
    name: str, request: pytest.FixtureRequest
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(name)
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    engine = make("torch", folder, Role.AGGREGATED)
    async with started(engine):
        for length in (1, 32, 33, 128, 129, 1000):
            prompt = token_ids(token % 500 + 5 for token in prompt_of(length))
            ids = torch.tensor([list(prompt)])
            got = await answer(engine, prompt, max_tokens=12)
            wanted = reference.generate(ids, max_new_tokens=12, do_sample=False)[
                0, length:
            ].tolist()
            assert got == wanted
            assert len(set(got)) > 3


@pytest.mark.parametrize(
    ("role", "lengths"), [(Role.AGGREGATED, (1, 2, 256, 257, 600)), (Role.PREFILL, (1, 2, 257))]
)
async def test_prompt_logprobs_equal_logits_of_transformers(
    gpt_oss: Path, role: Role, lengths: tuple[int, ...]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        gpt_oss, dtype=torch.float32, attn_implementation="eager"
    )
    phase = Phase.PREFILL if role is Role.PREFILL else Phase.AGGREGATED
    engine = make("torch", gpt_oss, role, prefill_chunk_tokens=CHUNK)
    async with started(engine):
        prompts = [prompt_of(length) for length in lengths]
        asked = [
            ask(prompt, phase=phase, prompt_logprobs=2, logprobs=0, max_tokens=2)
            for prompt in prompts
        ]
        asked.append(ask(prompts[-1], phase=phase))
        *scored, plain = await asyncio.gather(*(collect(engine, ids) for ids in asked))
        assert not any(chunk.prompt_logprobs for chunk in plain)
        for prompt, chunks in zip(prompts, scored, strict=True):
            first, *rest = [entry for chunk in chunks for entry in chunk.prompt_logprobs]
            assert (first.token_id, math.isnan(first.logprob), first.top) == (prompt[0], True, ())
            assert [entry.token_id for entry in rest] == list(prompt[1:])
            with torch.inference_mode():
                wanted = reference(torch.tensor([list(prompt)])).logits[0].log_softmax(-1)
            own = [float(wanted[at, token]) for at, token in enumerate(prompt[1:])]
            assert [entry.logprob for entry in rest] == pytest.approx(own, abs=1e-4)
            likeliest = wanted[: len(rest)].topk(2)
            assert [
                token for entry in rest for token, _ in entry.top
            ] == likeliest.indices.flatten().tolist()
            assert [p for entry in rest for _, p in entry.top] == pytest.approx(
                likeliest.values.flatten().tolist(), abs=1e-4
            )


@pytest.fixture(scope="module")
def of_one_process() -> dict[float, list[list[int]]]:
    """Return the tokens for LENGTHS by temperature.

    They are computed once, without a KV transfer.
    """
    return {}


async def ask_one_process(folder: Path, sampling: dict[str, Any]) -> list[list[int]]:
    aggregated = make("torch", folder, Role.AGGREGATED, prefill_chunk_tokens=CHUNK)
    async with started(aggregated):
        return [await answer(aggregated, prompt_of(length), **sampling) for length in LENGTHS]


@pytest.mark.parametrize(("backend", "temperature"), [("tcp", 0.9), ("nixl", 0.0)])
async def test_two_calls_at_every_boundary_then_equal_to_one_process(
    gpt_oss: Path, backend: str, temperature: float, of_one_process: dict[float, list[list[int]]]
) -> None:
    sampling = {"max_tokens": 6, "temperature": temperature, "seed": 11, "logprobs": 2}
    if temperature not in of_one_process:
        of_one_process[temperature] = await ask_one_process(gpt_oss, sampling)
    prefill = make("torch", gpt_oss, Role.PREFILL, backend=backend, prefill_chunk_tokens=CHUNK)
    decode = make("torch", gpt_oss, Role.DECODE, backend=backend)
    async with started(prefill, decode):
        for length, expected in zip(LENGTHS, of_one_process[temperature], strict=True):
            got = await prefill_then_decode(prefill, decode, prompt_of(length), **sampling)
            assert tokens(got) == expected, length
            logprobs = [entry.token_id for chunk in got for entry in chunk.logprobs]
            assert logprobs == tokens(got)
        await check_nothing_left(decode)
        await check_nothing_left(prefill)


async def test_two_calls_cancelled_during_fetch_leave_nothing(gpt_oss: Path) -> None:
    class Stuck(LoopbackBackend):
        async def read(self, *args: Any, **kwargs: Any) -> None:
            reached.set()
            await asyncio.Event().wait()

    reached = asyncio.Event()
    config = WorkerConfig(
        model_path=str(gpt_oss), served_model_name="tiny", disaggregation_mode=Role.DECODE
    )
    prefill = make("torch", gpt_oss, Role.PREFILL)
    decode = TorchEngine(config, instance_id=3, backend=Stuck())
    async with started(prefill, decode):
        kv_params = await prefill_params(prefill, prompt_of(100))
        task = asyncio.create_task(
            collect(decode, ask(prompt_of(100), phase=Phase.DECODE, kv_params=kv_params))
        )
        await reached.wait()
        assert decode.stats().kv_blocks_used == 4
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await check_nothing_left(decode)


async def test_sampling_is_reproducible_only_when_seeded(gpt_oss: Path) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    sampling: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "top_p": 0.95, "top_k": 50}
    async with started(engine):
        seeded = [await answer(engine, prompt_of(20), seed=5, **sampling) for _ in range(2)]
        assert seeded[0] == seeded[1]
        assert len({tuple(await answer(engine, prompt_of(20), **sampling)) for _ in range(4)}) > 1


async def test_stop_ids_when_met_then_stop_unless_held_back(gpt_oss: Path) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    async with started(engine):
        free = await answer(engine, prompt_of(20))
        stop = (free[3],)
        chunks = await collect(engine, ask(prompt_of(20), stop_token_ids=stop))
        assert chunks[-1].finish_reason is FinishReason.STOP
        assert tokens(chunks) == free[:4]
        held = await answer(engine, prompt_of(20), stop_token_ids=stop, min_tokens=8)
        assert len(held) == 8
        assert free[3] not in held


async def test_close_when_streams_run_then_they_end_in_engine_failed(gpt_oss: Path) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    async with started(engine):
        stream = as_stream(engine, ask(prompt_of(20), max_tokens=5000))
        await anext(stream)
        await engine.aclose()
        with pytest.raises(EngineFailed):
            async for _ in stream:
                pass


async def test_close_when_a_receiver_fails_then_other_streams_end(gpt_oss: Path) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)

    def failing(event: StreamEvent) -> None:
        if isinstance(event, EngineFailed):
            raise RuntimeError("a bug of a receiver")

    async with started(engine):
        engine.generate(ask(prompt_of(20), max_tokens=5000), failing)
        stream = as_stream(engine, ask(prompt_of(20), max_tokens=5000))
        await anext(stream)
        await engine.aclose()
        with pytest.raises(EngineFailed):
            async for _ in stream:
                pass


async def test_load_counts_step_requests_and_newer_ones(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make("torch", gpt_oss, Role.PREFILL, prefill_chunk_tokens=64)
    assert isinstance(engine, TorchEngine)
    entered = asyncio.Event()
    goes_on = threading.Event()
    async with started(engine):
        assert engine._scheduler is not None
        loop = asyncio.get_running_loop()
        module = engine._scheduler.model_runner.module

        def slow(**inputs: Any) -> Any:
            loop.call_soon_threadsafe(entered.set)
            goes_on.wait(SOON_S)
            return module(**inputs)

        monkeypatch.setattr(engine._scheduler.model_runner, "module", slow)
        try:
            first = asyncio.create_task(prefill_params(engine, prompt_of(100)))
            await asyncio.wait_for(entered.wait(), SOON_S)
            load = engine.stats()
            assert (
                load.running,
                load.waiting,
                load.queued_prefill_tokens,
                load.kv_blocks_used,
            ) == (1, 0, 100, 4)
            others = [
                asyncio.create_task(prefill_params(engine, prompt_of(length, length)))
                for length in (40, 70)
            ]
            await asyncio.sleep(0)  # they post their requests
            load = engine.stats()
            assert (load.running, load.waiting, load.queued_prefill_tokens) == (1, 2, 210)
        finally:
            goes_on.set()
        for kv_params in await asyncio.gather(first, *others):
            release(engine, kv_params)
        await check_nothing_left(engine)
        steps = list(engine.steps)
        assert sum(step.prefill_tokens for step in steps) >= 210
        assert (steps[-1].decode_requests, steps[-1].seconds > 0) == (0, True)


async def test_step_when_it_breaks_then_streams_fail_and_check_raises(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    async with started(engine):

        def broken(*_: Any) -> None:
            raise RuntimeError("no such kernel")

        monkeypatch.setattr("dynamo_trtllm.engines.torch.model_runner.sample", broken)
        with pytest.raises(EngineFailed, match="no such kernel"):
            await answer(engine, prompt_of(20))
        with pytest.raises(EngineFailed, match="no such kernel"):
            await engine.check()


async def test_generate_when_request_is_wrong_then_refused(gpt_oss: Path) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    async with started(engine):
        for prompt in (token_ids(), token_ids([2048])):
            with pytest.raises(RequestRejected):
                await answer(engine, prompt)


async def test_start_when_folder_is_missing_then_closes_backend(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        backend = LoopbackBackend()
        engine = make("torch", folder, Role.PREFILL, backend=backend)
        with pytest.raises(ConfigError, match=str(folder)):
            await engine.start()
        await engine.aclose()
        with pytest.raises(TransferFailed, match="stopped"):
            backend.checksums.submit(MemoryRegion(0, 1 << 20, "cuda:0"))


async def test_start_ignores_stop_tokens_beyond_vocabulary(llama: Path, tmp_path: Path) -> None:
    """A frontend rejects a card with such ids."""
    folder = shutil.copytree(llama, tmp_path / "model")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 2, 512, 100_000]})
    )
    engine = make("torch", folder, Role.AGGREGATED)
    try:
        assert (await engine.start()).eos_token_ids == (1, 2)
    finally:
        await engine.aclose()


async def test_prefill_cancelled_as_kv_is_ready_leaves_nothing(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_prefilled = TorchEngine._on_prefilled

    def export_and_cancel(engine: TorchEngine, seq: TorchSequence, *args: Any) -> None:
        on_prefilled(engine, seq, *args)
        seq.cancel()  # before the task that exports the KV has begun

    monkeypatch.setattr(TorchEngine, "_on_prefilled", export_and_cancel)
    engine = make("torch", gpt_oss, Role.PREFILL)
    async with started(engine):
        events: list[StreamEvent] = []
        engine.generate(ask(prompt_of(20), phase=Phase.PREFILL), events.append)
        await check_nothing_left(engine)
        assert events == []


async def test_receiver_bug_does_not_affect_other_receivers(
    gpt_oss: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class ReceiverBug(Exception):
        pass

    def raises(event: StreamEvent) -> None:
        raise ReceiverBug

    engine = make("torch", gpt_oss, Role.AGGREGATED)
    async with started(engine):
        engine.generate(ask(prompt_of(20), max_tokens=20), raises)
        assert (
            len(await asyncio.wait_for(answer(engine, prompt_of(20), max_tokens=20), SOON_S)) == 20
        )
        await asyncio.wait_for(engine.drain(), SOON_S)
    bugs = [record.exc_info for record in caplog.records if record.exc_info]
    assert {kind for kind, _, _ in bugs} == {ReceiverBug}


async def test_receiver_bug_keeps_the_order_of_events(gpt_oss: Path) -> None:
    engine = make("torch", gpt_oss, Role.AGGREGATED)
    assert isinstance(engine, TorchEngine)
    order: list[int] = []
    loop = asyncio.get_running_loop()
    # Two steps of the scheduler, of which the loop has run none yet.
    loop.call_soon(engine._receive, [[].pop, partial(order.append, 1)])
    loop.call_soon(engine._receive, [partial(order.append, 2)])
    for _ in range(3):
        await asyncio.sleep(0)
    assert order == [1, 2]
