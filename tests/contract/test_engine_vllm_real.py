"""The vllm engine over the real vLLM, on a GPU or on this CPU: parity, cancellation, death, the
manifest.

Run with `pytest -m vllm`. Two engines are loaded once: minutes on a small machine. Models of other
kinds are in test_engine_vllm_models_real.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import signal
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio
from tokenizers import pre_tokenizers

from dynamo_trtllm.engines.engine_interface import EngineInfo
from dynamo_trtllm.engines.vllm import releases
from dynamo_trtllm.engines.vllm.transfer_params import unpack
from dynamo_trtllm.engines.warm_up import WarmUp, variants
from dynamo_trtllm.protocol.errors import EngineFailed
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    Limits,
    OutputFormat,
    Phase,
    ReleaseOutcome,
    StructuredOutput,
)
from dynamo_trtllm.protocol.streams import OnEvent, StreamEvent, as_stream
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    check_stats,
    collect,
    prompt_of,
    release,
    tokens,
)
from tests.contract.vllm_real import (
    FIRST_BYTE,
    ROOT,
    SPOILED,
    Pair,
    all_failed_reads,
    save_byte_tokenizer,
    save_model,
    started,
)
from tests.kit.engines import answer, prefill_params, prefill_then_decode

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # the vendor's
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with started(
        save_byte_tokenizer(save_model(tmp_path_factory.mktemp("models") / "llama"))
    ) as engines:
        yield engines


@pytest.mark.parametrize("length", [5, 100, 128, 200, 256, 700])
async def test_two_calls_when_greedy_then_the_answer_is_the_whole_one(
    pair: Pair, length: int
) -> None:
    prompt = prompt_of(length, 3)
    chunks = await prefill_then_decode(pair.prefill, pair.decode, prompt, max_tokens=24)
    assert tokens(chunks) == await answer(pair.prefill, prompt, max_tokens=24)
    assert tokens(chunks) == await answer(pair.decode, prompt, max_tokens=24)
    stats = chunks[-1].stats
    assert stats is not None
    assert stats.kv_bytes > 0
    for engine in pair:
        await check_nothing_left(engine)


@pytest.mark.parametrize("length", [150, 256])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "seed": 5},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"logprobs": 3},
        {"logit_bias": ((1, 100.0),), "min_tokens": 4},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 2**40},
        {"ignore_eos": True, "logit_bias": ((1, 100.0),)},
    ],
    ids=["seed", "frequency", "presence", "logprobs", "min_tokens", "top", "ignore_eos"],
)
async def test_two_calls_with_any_sampling_equal_aggregated(
    pair: Pair, length: int, sampling: dict[str, Any]
) -> None:
    prompt = prompt_of(length, 11)
    chunks = await prefill_then_decode(pair.prefill, pair.decode, prompt, max_tokens=12, **sampling)
    whole = await collect(pair.decode, ask(prompt, max_tokens=12, **sampling))
    assert tokens(chunks) == tokens(whole)
    assert chunks[-1].finish_reason is whole[-1].finish_reason
    if "logprobs" in sampling:
        entries = [entry for chunk in chunks for entry in chunk.logprobs]
        own = [entry for chunk in whole for entry in chunk.logprobs]
        assert [entry.token_id for entry in entries] == tokens(chunks)
        assert [entry.logprob for entry in entries] == pytest.approx(
            [entry.logprob for entry in own], abs=1e-3
        )
        assert [len(entry.top) for entry in entries] == [3] * len(entries)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.AGGREGATED])
async def test_prompt_logprobs_of_generated_tokens_equal_the_engine(
    pair: Pair, phase: Phase
) -> None:
    prompt = prompt_of(150, 19)
    generated = await collect(pair.prefill, ask(prompt, max_tokens=12, logprobs=0))
    own = [entry.logprob for chunk in generated for entry in chunk.logprobs]
    longer = prompt + array(prompt.typecode, tokens(generated))
    chunks = await collect(pair.prefill, ask(longer, phase=phase, max_tokens=1, prompt_logprobs=2))
    scored = [entry for chunk in chunks for entry in chunk.prompt_logprobs]
    assert [entry.token_id for entry in scored] == list(longer)
    assert [entry.logprob for entry in scored[-len(own) :]] == pytest.approx(own, abs=1e-3)
    assert {len(entry.top) for entry in scored[1:]} == {2}
    if chunks[-1].kv_params is not None:
        release(pair.prefill, chunks[-1].kv_params)
    await check_nothing_left(pair.prefill)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (OutputFormat(json_schema="", regex="[0-9]{3}-(yes|no)"), "[0-9]{3}-(yes|no)"),
        (OutputFormat(json_schema="", regex="red|dark green"), "red|dark green"),
        (OutputFormat(json_schema="", grammar='root ::= "<" [a-c] [a-c] ">"'), "<[a-c][a-c]>"),
        (OutputFormat(json_schema='{"enum": ["one", "two"]}'), '"(one|two)"'),
    ],
    ids=["regex", "choice", "grammar", "schema"],
)
async def test_two_calls_keep_the_output_form_to_the_end(
    pair: Pair, form: OutputFormat, pattern: str
) -> None:
    guided = StructuredOutput(alternatives=(form,))
    calls = await prefill_then_decode(
        pair.prefill, pair.decode, prompt_of(150, 23), max_tokens=40, guided=guided
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert calls[-1].finish_reason is FinishReason.STOP
    text = "".join(letters[token - FIRST_BYTE] for token in tokens(calls) if token >= FIRST_BYTE)
    assert re.fullmatch(pattern, text.replace("Ġ", " "))  # the alphabet's letter for a space


async def test_two_calls_without_seed_begin_with_transferred_token(pair: Pair) -> None:
    for length in (150, 256):
        prompt = prompt_of(length, 21)
        kv_params = await prefill_params(pair.prefill, prompt, temperature=1.0)
        chunks = await collect(
            pair.decode, ask(prompt, phase=Phase.DECODE, kv_params=kv_params, temperature=1.0)
        )
        stats = chunks[-1].stats
        assert stats is not None
        parts = [stats.more[f"kv_transfer.{part}"] for part in ("queue", "post", "read", "notice")]
        assert min(parts) >= 0
        assert sum(parts) <= stats.kv_transfer_s
        release(pair.prefill, kv_params, ReleaseOutcome.FETCHED)
        assert tokens(chunks)[0] == kv_params.first_token_ids[0]


async def test_longer_streams_wake_no_task_more_often(pair: Pair) -> None:
    """Per step one wake-up of vLLM's output handler, for all requests; none per request and
    token.
    """
    wakes = Counter[str]()
    loop = asyncio.get_running_loop()
    loop.set_task_factory(
        lambda loop, work, **more: asyncio.Task(_Counted(work, wakes), loop=loop, **more)
    )
    try:
        counts = []
        for max_tokens in (10, 60):
            wakes.clear()
            ended = [loop.create_future() for _ in range(8)]
            for n, end in enumerate(ended):
                request = ask(prompt_of(40, n), max_tokens=max_tokens, ignore_eos=True)
                pair.decode.generate(request, _last_to(end))
            await asyncio.wait_for(asyncio.gather(*ended), 60)
            counts.append(wakes.total())
    finally:
        loop.set_task_factory(None)
    assert counts[0] == counts[1]  # of the tasks that submit the 8 requests


def _last_to(end: asyncio.Future[None]) -> OnEvent:
    def on_event(event: StreamEvent) -> None:
        if not isinstance(event, Chunk):
            end.set_exception(event)
        elif event.finish_reason is not None:
            end.set_result(None)

    return on_event


class _Counted(Coroutine[Any, Any, Any]):
    """A coroutine that counts how often its task continues it, by name."""

    def __init__(self, work: Coroutine[Any, Any, Any], wakes: Counter[str]) -> None:
        self._work = work
        self._wakes = wakes

    def send(self, value: Any) -> Any:
        self._wakes[getattr(self._work, "__qualname__", "?")] += 1
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()


async def test_two_calls_when_many_run_at_once_then_each_is_its_own(pair: Pair) -> None:
    prompts = [prompt_of(40 + 23 * n, n) for n in range(24)]
    alone = [await answer(pair.prefill, prompt, max_tokens=16) for prompt in prompts]
    answers = await asyncio.gather(
        *(
            prefill_then_decode(pair.prefill, pair.decode, prompt, max_tokens=16)
            for prompt in prompts
        )
    )
    assert [tokens(chunks) for chunks in answers] == alone
    for engine in pair:
        await check_nothing_left(engine)


async def test_steps_report_computed_tokens_and_time(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        engine.steps.clear()
    await prefill_then_decode(pair.prefill, pair.decode, prompt_of(70, 31), max_tokens=9)
    prefills = list(pair.prefill.steps)
    decodes = list(pair.decode.steps)
    assert sum(step.prefill_tokens for step in prefills) == 70
    assert 7 <= len(decodes) <= 9
    assert {step.decode_requests for step in decodes} == {1}
    assert [step.context_tokens for step in decodes] == [
        *range(decodes[0].context_tokens, 69 + len(decodes) + 1)
    ]
    assert all(0 < step.seconds < 10 for step in (*prefills, *decodes))


async def test_prefill_holds_nothing_when_first_token_ends_the_answer(pair: Pair) -> None:
    prompt = prompt_of(90, 31)
    stop = (await answer(pair.decode, prompt))[0]
    (last,) = await collect(pair.prefill, ask(prompt, phase=Phase.PREFILL, stop_token_ids=(stop,)))
    assert (last.finish_reason, last.kv_params) == (FinishReason.STOP, None)
    await check_nothing_left(pair.prefill)


async def test_release_when_rejected_then_kv_is_freed_before_its_lease(pair: Pair) -> None:
    kv_params = await prefill_params(pair.prefill, prompt_of(300, 41))
    await check_stats(pair.prefill, pending_kv_transfers=1)
    assert pair.prefill.stats().kv_blocks_used > 0
    began = time.monotonic()
    release(pair.prefill, kv_params)
    await check_nothing_left(pair.prefill)
    assert time.monotonic() - began < 10  # the lease is of 65 s


@pytest.mark.parametrize("count", [6, pytest.param(250, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", SPOILED)
async def test_decode_when_kv_is_unreadable_then_caches_nothing(
    pair: Pair, how: str, count: int
) -> None:
    assert await all_failed_reads(pair, count, how) == []


async def test_cancel_at_any_moment_frees_every_block(pair: Pair) -> None:
    async def one_request(n: int) -> None:
        prompt = prompt_of(100 + n * 37 % 700, n)
        kv_params = await prefill_params(pair.prefill, prompt, max_tokens=100)
        outcome = ReleaseOutcome.ABORTED
        try:
            await collect(
                pair.decode, ask(prompt, phase=Phase.DECODE, kv_params=kv_params, max_tokens=100)
            )
            outcome = ReleaseOutcome.FETCHED
        finally:
            release(pair.prefill, kv_params, outcome)

    tasks = [asyncio.create_task(one_request(n)) for n in range(40)]
    for n, task in enumerate(tasks):
        if n % 3 == 0:
            asyncio.get_running_loop().call_later(0.02 * n, task.cancel)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for n, result in enumerate(results) if n % 3] == [type(None)] * 26
    async with asyncio.timeout(30):
        for engine in pair:
            await engine.drain()
    for engine in pair:
        await check_nothing_left(engine)


async def test_cancel_when_tokens_flow_then_nothing_is_left(pair: Pair) -> None:
    async with aclosing(as_stream(pair.decode, ask(prompt_of(60, 51), max_tokens=1500))) as stream:
        for _ in range(3):
            await anext(stream)
    await check_nothing_left(pair.decode)


async def test_cache_salt_when_it_differs_then_nothing_is_reused(pair: Pair) -> None:
    async def cached(salt: str) -> int:
        request = msgspec.structs.replace(ask(prompt_of(600, 61)), cache_salt=salt)
        stats = (await collect(pair.decode, request))[-1].stats
        assert stats is not None
        return stats.cached_tokens

    assert await cached("a") == 0
    assert await cached("a") > 0
    assert await cached("b") == 0


async def test_prefill_of_cached_prompt_reports_uncomputed_tokens(pair: Pair) -> None:
    prompt = prompt_of(600, 63)
    counts = []
    for _ in range(2):
        (last,) = await collect(pair.prefill, ask(prompt, phase=Phase.PREFILL))
        assert last.kv_params is not None
        assert last.stats is not None
        release(pair.prefill, last.kv_params)
        counts.append(last.stats.cached_tokens)
    assert counts[0] == 0
    assert 500 < counts[1] < 600
    await check_nothing_left(pair.prefill)


async def collect_rest(stream: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    return [chunk async for chunk in stream]


async def test_manifest_when_compared_with_the_package_then_equal() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "vllm_manifest"))["manifest"]()
    name = releases.installed().manifest.name
    read = json.loads((ROOT / f"dynamo_trtllm/engines/vllm/api_manifests/{name}.json").read_text())
    assert made["classes"] == read["classes"]


async def test_handshakes_use_chosen_port_outside_compilation_key(pair: Pair) -> None:
    import vllm.envs

    kv_params = await prefill_params(pair.prefill, prompt_of(40, 5))
    port = unpack(kv_params).kv_transfer_params["remote_port"]
    release(pair.prefill, kv_params)
    assert vllm.envs.compile_factors()["VLLM_NIXL_SIDE_CHANNEL_PORT"] != port


async def test_warm_up_does_not_change_answers(pair: Pair) -> None:
    prompt = prompt_of(200, 67)
    before = await answer(pair.decode, prompt)
    library = pair.decode.library  # type: ignore[attr-defined]
    info = SimpleNamespace(
        unsupported_features=("guided",),  # the model has no tokenizer
        limits=Limits(max_batch_size=8, max_num_tokens=0, kv_blocks=0),
    )
    async with library.compiling():
        failed = await WarmUp(600.0).run(
            [
                *library.warm_up_steps([300, 17]),
                *variants(pair.decode, "tiny", cast("EngineInfo", info)),
            ]
        )
    assert failed == ()
    assert await answer(pair.decode, prompt) == before
    await check_nothing_left(pair.decode)


async def test_zz_killed_engine_process_fails_streams_and_check(pair: Pair) -> None:
    """Last: the decode engine is gone afterwards."""
    stream = as_stream(pair.decode, ask(prompt_of(60, 71), max_tokens=1900))
    await anext(stream)
    manager = pair.decode._llm.engine_core.resources.engine_manager  # type: ignore[attr-defined]
    for process in manager.processes:
        os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(EngineFailed):
            await collect_rest(stream)
    with pytest.raises(EngineFailed):
        await pair.decode.check()
