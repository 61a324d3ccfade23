"""What the trtllm engine promises beyond the contract: it survives every trap of TensorRT-LLM,
played by a stand-in.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import aclosing
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import msgspec
import pytest

from dynamo_trtllm.engines.external.runner import MAX_FAILED_REQUESTS
from dynamo_trtllm.models import resolve
from dynamo_trtllm.protocol.errors import (
    ContextTooLong,
    DeadlineExceeded,
    DynamoError,
    EngineFailed,
    RequestRejected,
    TransferFailed,
    TransferMismatch,
    TransferTimeout,
)
from dynamo_trtllm.protocol.messages import (
    Chunk,
    FinishReason,
    OutputFormat,
    Phase,
    Role,
    StructuredOutput,
)
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    check_stats,
    collect,
    prompt_of,
    release,
    started,
    tokens,
)
from tests.kit.engines import answer, error_code, make, prefill_params, prefill_then_decode
from tests.kit.fake_packages import RELEASES, fake_tensorrt_llm, shorten_waits, trap_names
from tests.kit.trtllm_engines import TrtllmEngines, check_engines_idle, start_engines
from tests.kit.waiting import SOON_S

HARMONY_STOPS = (200002, 200012)
PROMPT = prompt_of(70)
# Those that change what an answer is made of, or take an answer away; every other is survived
# without a trace.
FAILING = {
    "refused_at_call": RequestRejected,
    "unsupported_at_call": RequestRejected,
    "request_fails": RequestRejected,
    "step_fails": RequestRejected,
    "finishes_timeout": DeadlineExceeded,
    "never_answers": DeadlineExceeded,
}
# looked at when it starts or ends
OF_AN_EXECUTOR = ("big_ids", "shutdown_hangs", "model_defaults", "no_block_size")
IN_OTHER_FILES = {
    *FAILING,
    *"""
    context_refuses_overlap transfer_fails transfer_hangs executor_dies no_context_params start_fails
    abort_never_answers abort_lost abort_fails abort_slow abort_drops_waiting abort_keeps_context
    block_size_fixed logprobs_asserted min_tokens_ignored min_p_ignored penalties_ignored seed_ignored
    ignore_eos_drops_stop_words result_call_fails no_disagg_id wakeup_fails
    """.split(),
}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch)


class Expected(NamedTuple):
    free: list[int]
    stopped: list[int]  # by a token of the request
    ended: list[int]  # by the model's own


ENDED: dict[str, Any] = {"logit_bias": ((1, 1000.0),), "min_tokens": 3}


async def check_answers(engines: TrtllmEngines, expected: Expected) -> None:
    """Tokens and log-probabilities are right, aggregated and disaggregated, with a stop token and
    without.
    """
    stop = {"stop_token_ids": (expected.stopped[-1],)}
    cases = [
        ({}, expected.free, FinishReason.LENGTH),
        (stop, expected.stopped, FinishReason.STOP),
        (ENDED, expected.ended, FinishReason.STOP),
    ]
    # At once, because a step of the model then serves several of them.
    await asyncio.gather(*(check_case(engines, *case) for case in cases))
    for engine in (engines.prefill, engines.decode, engines.aggregated):
        await check_stats(engine, running=0)


async def check_case(
    engines: TrtllmEngines, sampling: dict[str, Any], wanted: list[int], reason: FinishReason
) -> None:
    chosen = {"logprobs": 1, **sampling}
    # which has no log-probabilities
    split = chosen if engines.package.standin.release.LINE >= (1, 3) else sampling
    aggregated, disaggregated = await asyncio.gather(
        collect(engines.aggregated, ask(PROMPT, **chosen)),
        prefill_then_decode(engines.prefill, engines.decode, PROMPT, **split),
    )
    for chunks in (aggregated, disaggregated):
        assert tokens(chunks) == wanted
        assert chunks[-1].finish_reason is reason
        if chunks[0].logprobs or split is chosen:
            check_logprobs(chunks)


def check_logprobs(chunks: list[Chunk]) -> None:
    assert [entry.token_id for chunk in chunks for entry in chunk.logprobs] == tokens(chunks)


@pytest.fixture(scope="module")
def of_torch(gpt_oss: Path) -> Expected:
    """The answers of the torch engine itself."""

    async def ask_torch() -> Expected:
        engine = make("torch", gpt_oss, Role.AGGREGATED)
        async with started(engine):
            free = await answer(engine, PROMPT)
            stopped = await answer(engine, PROMPT, stop_token_ids=(free[4],))
            return Expected(free, stopped, await answer(engine, PROMPT, **ENDED))

    return asyncio.run(ask_torch())


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "transceiver"),
    [
        *product(RELEASES, ["UCX"]),
        # test_engine.py and test_trtllm_matrix.py have the Python transceiver, too
        *(pytest.param(version, "NIXL", marks=pytest.mark.long) for version in RELEASES[2:]),
    ],
)
async def test_answers_of_any_release_equal_the_torch_engine(
    version: str, transceiver: str, gpt_oss: Path, of_torch: Expected
) -> None:
    assert len(of_torch.stopped) < len(of_torch.free)
    assert of_torch.ended[3:] == [1]
    with fake_tensorrt_llm(version) as package:
        async with start_engines(package, gpt_oss, transceiver=transceiver) as engines:
            await check_answers(engines, of_torch)
            sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7}
            chosen = await prefill_then_decode(engines.prefill, engines.decode, PROMPT, **sampled)
            assert tokens(chosen) == await answer(engines.aggregated, PROMPT, **sampled)
            with engines.turned("no_disagg_id"):
                lacking = await prefill_then_decode(engines.prefill, engines.decode, PROMPT)
            assert tokens(lacking) == of_torch.free


@pytest.mark.parametrize("at_once", [4, pytest.param(1, marks=pytest.mark.long)])
async def test_answers_when_traps_are_turned_then_the_same(
    engines: TrtllmEngines, of_torch: Expected, subtests: pytest.Subtests, at_once: int
) -> None:
    traps = engines.package.standin.traps
    names = [name for name in trap_names() if name not in (*IN_OTHER_FILES, *OF_AN_EXECUTOR)]
    assert len(names) > 15
    for first in range(0, len(names), at_once):
        some = names[first : first + at_once]
        with subtests.test(" ".join(some)), traps.turned(*map(traps.flipped, some)):
            await check_answers(engines, of_torch)


@pytest.mark.parametrize("trap", OF_AN_EXECUTOR)
async def test_answers_when_an_executor_has_a_trap_then_the_same(
    trap: str, gpt_oss: Path, package: Any, of_torch: Expected
) -> None:
    traps = package.standin.traps
    with traps.turned(traps.flipped(trap)):
        async with start_engines(package, gpt_oss) as engines:
            await check_answers(engines, of_torch)


async def test_answers_when_steps_have_several_tokens_then_complete(
    gpt_oss: Path, package: Any, of_torch: Expected, subtests: pytest.Subtests
) -> None:
    async with start_engines(package, gpt_oss, stream_interval=3) as engines:
        for trap in ("big_ids", "end_id_cut", "empty_last_step", "stop_words_shown_first"):
            with subtests.test(trap), engines.turned(trap):
                await check_answers(engines, of_torch)


async def test_prefill_of_one_token_makes_no_context_only_call(
    engines: TrtllmEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    plain = engines.package.llmapi.LLM.generate_async

    def noted(self: Any, **call: Any) -> Any:
        seen.append(call.get("disaggregated_params"))
        return plain(self, **call)

    monkeypatch.setattr(engines.package.llmapi.LLM, "generate_async", noted)
    (last,) = await collect(engines.prefill, ask(PROMPT, phase=Phase.PREFILL, max_tokens=1))
    assert (last.finish_reason, last.kv_params, len(last.token_ids)) == (
        FinishReason.LENGTH,
        None,
        1,
    )
    assert seen == [None]


# --- Harmony's stop tokens, with the bundled model ------------------------------------------------


async def test_stop_when_harmony_ends_a_turn_then_no_transfer_is_left(package: Any) -> None:
    aggregated, prefill = (
        make("trtllm", resolve("tiny-gpt-oss"), role) for role in (Role.AGGREGATED, Role.PREFILL)
    )
    async with started(aggregated, prefill):
        for stop in HARMONY_STOPS:
            forced = {"logit_bias": ((stop, 1000.0),), "max_tokens": 20}
            for engine, phase in ((aggregated, Phase.AGGREGATED), (prefill, Phase.PREFILL)):
                (last,) = await collect(engine, ask(PROMPT, phase=phase, **forced))
                assert (list(last.token_ids), last.finish_reason, last.kv_params) == (
                    [stop],
                    FinishReason.STOP,
                    None,
                )
                await check_nothing_left(engine)
            on = await collect(aggregated, ask(PROMPT, ignore_eos=True, **forced))
            assert tokens(on) == [stop] * 20


async def test_debug_log_has_both_request_ids(
    engines: TrtllmEngines, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "dynamo_trtllm")
    request = msgspec.structs.replace(ask(PROMPT), request_id="client-7")
    await collect(engines.aggregated, request)
    (line,) = [record.message for record in caplog.records if "client-7" in record.message]
    assert re.search(r"client-7 .* \d{19}$", line)  # the fake's ids have 63 bits


# --- refusals -------------------------------------------------------------------------------------


async def test_guided_when_no_backend_is_set_then_refused_by_name(engines: TrtllmEngines) -> None:
    guided = StructuredOutput(alternatives=(OutputFormat(json_schema="{}"),))
    with pytest.raises(RequestRejected) as caught:
        await answer(engines.aggregated, PROMPT, guided=guided)
    assert caught.value.field == "guided"


@pytest.mark.parametrize(
    ("role", "args", "why"),
    [
        (
            Role.PREFILL,
            {"cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 64}},
            "max_tokens_in_buffer",
        ),
        (Role.AGGREGATED, {"max_num_tokens": 64}, "max_num_tokens"),
        (Role.AGGREGATED, {"max_seq_len": 65}, "max_seq_len"),
    ],
)
async def test_prompt_over_limit_is_rejected_with_its_argument(
    gpt_oss: Path, package: Any, role: Role, args: dict[str, Any], why: str
) -> None:
    engine = make("trtllm", gpt_oss, role, **args)
    phase = Phase.PREFILL if role is Role.PREFILL else Phase.AGGREGATED
    async with started(engine):
        with pytest.raises(ContextTooLong, match=why):
            await collect(engine, ask(prompt_of(65), phase=phase))
        await collect(engine, ask(prompt_of(64), phase=phase, max_tokens=1))


async def test_transfer_of_another_release_is_rejected_by_name(gpt_oss: Path) -> None:
    for theirs, ours in pairwise(RELEASES):
        with fake_tensorrt_llm(theirs):
            prefill = make("trtllm", gpt_oss, Role.PREFILL, ttl_s=60.0)
            async with started(prefill):
                kv_params = await prefill_params(prefill, PROMPT)
        with fake_tensorrt_llm(ours):
            decode = make("trtllm", gpt_oss, Role.DECODE)
            async with started(decode):
                with pytest.raises(TransferMismatch) as caught:
                    await collect(decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
                await check_nothing_left(decode)
        assert caught.value.field == "release", ours


# --- failures -------------------------------------------------------------------------------------


async def test_request_when_it_fails_then_named_and_the_engine_goes_on(
    engines: TrtllmEngines, subtests: pytest.Subtests
) -> None:
    for trap, error in FAILING.items():
        request = ask(PROMPT)
        if trap == "never_answers":
            request = msgspec.structs.replace(request, deadline=time.time() + 0.2)
        with subtests.test(trap):
            with engines.turned(trap):
                with pytest.raises(DynamoError) as caught:
                    await collect(engines.aggregated, request)
                assert type(caught.value) is error
                await check_nothing_left(engines.aggregated)
            await engines.aggregated.check()
            assert len(await answer(engines.aggregated, PROMPT)) == 8


async def test_unsupported_requests_do_not_stop_the_engine(engines: TrtllmEngines) -> None:
    with engines.turned("unsupported_at_call"):
        for number in range(2 * MAX_FAILED_REQUESTS):
            request = msgspec.structs.replace(ask(PROMPT), request_id=f"client-{number}")
            assert await error_code(engines.aggregated, request) == "engine_rejected"
    await engines.aggregated.check()
    assert len(await answer(engines.aggregated, PROMPT)) == 8


async def test_adapter_bug_is_internal_but_value_error_is_a_rejection(
    engines: TrtllmEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = "dynamo_trtllm.engines.trtllm"
    theirs = "tensorrt_llm"
    bugs = [
        (f"{ours}.{p}", "internal")
        for p in (
            "library.TrtllmRequest",
            "bindings.TrtllmBindings.arguments",
            "library.TrtllmCall.read",
        )
    ]
    refusals = [
        (f"{theirs}.{p}", "engine_rejected")
        for p in ("SamplingParams.__init__", "LLM.generate_async")
    ]
    cases = [*product(bugs, (ValueError, AttributeError)), *product(refusals, (ValueError,))]
    for (place, code), error in cases:
        with monkeypatch.context() as patch:
            patch.setattr(place, Mock(side_effect=error("wrong")))
            assert await error_code(engines.aggregated, ask(PROMPT)) == code
        await engines.aggregated.check()
        await check_nothing_left(engines.aggregated)
    assert len(await answer(engines.aggregated, PROMPT)) == 8


async def test_failed_step_ends_its_requests_and_next_is_served(engines: TrtllmEngines) -> None:
    with engines.turned("step_fails"):
        results = await asyncio.gather(
            *(answer(engines.aggregated, prompt_of(40, n), max_tokens=200) for n in range(4)),
            return_exceptions=True,
        )
    assert {type(result) for result in results} == {RequestRejected}
    assert len(await answer(engines.aggregated, PROMPT)) == 8
    await check_nothing_left(engines.aggregated)


@pytest.mark.parametrize(
    ("trap", "error"), [("transfer_fails", TransferFailed), ("finishes_timeout", TransferTimeout)]
)
async def test_decode_when_the_kv_does_not_come_then_a_transfer_error(
    trap: str, error: type[DynamoError], engines: TrtllmEngines
) -> None:
    kv_params = await prefill_params(engines.prefill, PROMPT)
    with engines.turned(trap), pytest.raises(DynamoError) as caught:
        await collect(engines.decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
    assert isinstance(caught.value, (error, TransferFailed, DeadlineExceeded))
    await check_nothing_left(engines.decode)
    release(engines.prefill, kv_params)
    await check_nothing_left(engines.prefill)
    await check_engines_idle(engines.package)


async def test_decode_ends_when_its_transfer_hangs(gpt_oss: Path, package: Any) -> None:
    prefill = make("trtllm", gpt_oss, Role.PREFILL, ttl_s=0.4)
    decode = make("trtllm", gpt_oss, Role.DECODE)
    async with started(prefill, decode):
        kv_params = await prefill_params(prefill, PROMPT)
        with package.standin.traps.turned("transfer_hangs"), pytest.raises(TransferTimeout):
            await collect(decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
        await check_nothing_left(decode)
        await check_nothing_left(prefill)


async def test_prefill_when_nothing_is_transferred_then_names_the_fix(
    engines: TrtllmEngines,
) -> None:
    with (
        engines.turned("no_context_params"),
        pytest.raises(RequestRejected, match=r"cache_transceiver_config\.backend"),
    ):
        await collect(engines.prefill, ask(PROMPT, phase=Phase.PREFILL))
    await check_nothing_left(engines.prefill)


async def test_prefill_when_scheduler_overlaps_then_vendor_error(
    gpt_oss: Path, package: Any
) -> None:
    engine = make("trtllm", gpt_oss, Role.PREFILL, disable_overlap_scheduler=False)
    async with started(engine):
        with (
            package.standin.traps.turned("context_refuses_overlap"),
            pytest.raises(RequestRejected, match="overlap"),
        ):
            await collect(engine, ask(PROMPT, phase=Phase.PREFILL))


async def test_dead_executor_fails_every_stream_and_check(engines: TrtllmEngines) -> None:
    engine = engines.aggregated
    await engine.check()
    async with aclosing(as_stream(engine, ask(PROMPT, max_tokens=4000))) as running:
        await anext(running)
        with engines.turned("executor_dies"), pytest.raises(EngineFailed):
            await answer(engine, PROMPT)
        with pytest.raises(EngineFailed):
            async for _ in running:
                pass
    with pytest.raises(EngineFailed):
        await engine.check()
    with pytest.raises(EngineFailed):
        await answer(engine, PROMPT)
    await engine.drain()


async def test_result_when_the_call_for_it_fails_then_no_rejection(engines: TrtllmEngines) -> None:
    # not RequestError
    with engines.turned("result_call_fails"), pytest.raises(EngineFailed, match="RPCError"):
        await answer(engines.aggregated, PROMPT)
    await check_nothing_left(engines.aggregated)
    assert len(await answer(engines.aggregated, PROMPT)) == 8


async def test_executor_when_it_dies_unseen_then_check_finds_out(engines: TrtllmEngines) -> None:
    async def until_it_fails() -> None:
        while await engines.aggregated.check() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    engines.package.standin.core.kill_all("a rank was lost")
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(until_it_fails(), SOON_S)


async def test_start_when_constructor_fails_then_engine_failed(gpt_oss: Path, package: Any) -> None:
    engine = make("trtllm", gpt_oss, Role.AGGREGATED)
    with (
        package.standin.traps.turned("start_fails"),
        pytest.raises(EngineFailed, match="Executor worker"),
    ):
        await engine.start()
    await engine.aclose()
