"""When and where an engine runs a request: priorities, attention-DP ranks, conversations."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines import waiting_requests as waiting
from dynamo_trtllm.engines.capabilities import MeasuresSteps
from dynamo_trtllm.engines.trtllm.engine import TrtllmEngine
from dynamo_trtllm.protocol.errors import RequestRejected
from dynamo_trtllm.protocol.messages import ClientShare, GenerateRequest, Role
from dynamo_trtllm.protocol.streams import as_stream
from dynamo_trtllm.testing.engine_requests import ask, check_stats, collect, prompt_of, started
from tests.kit.engines import make
from tests.kit.fake_packages import fake_tensorrt_llm, fake_vllm

RANKS = {"enable_attention_dp": True, "tensor_parallel_size": 2}
AFFINITY = RANKS | {"attention_dp_config": {"kv_cache_routing_conversation_affinity": True}}
PRIORITIES = {"scheduler_config": {"waiting_queue_policy": "priority"}}


def request(**fields: Any) -> GenerateRequest:
    return msgspec.structs.replace(ask(prompt_of(40), max_tokens=2), **fields)


async def rejected(engine: Any, **fields: Any) -> str | None:
    with pytest.raises(RequestRejected) as caught:
        await collect(engine, request(**fields))
    return caught.value.field


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("mock", {}),
        ("torch", {}),
        ("vllm", {"scheduling_policy": "priority"}),
        ("trtllm", PRIORITIES),
    ],
)
async def test_priority_lower_values_run_first(
    kind: str, args: dict[str, Any], gpt_oss: Path
) -> None:
    with ExitStack() as stack:
        stack.enter_context(fake_vllm() if kind == "vllm" else fake_tensorrt_llm("1.3.0rc29"))
        order = ["first", "below", "second", "third", "late"]
        assert await order_of_ends(kind, args, gpt_oss) == order


@pytest.mark.parametrize("kind", ["mock", "torch"])
async def test_priority_when_waits_are_long_then_arrival_order(
    kind: str, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MAX_WAIT_S", 0.0)
    order = ["late", "second", "third", "below", "first"]
    assert await order_of_ends(kind, {}, gpt_oss) == order


async def order_of_ends(kind: str, args: dict[str, Any], gpt_oss: Path) -> list[str]:
    """Queue requests of other priorities, and one of a client below its share, behind a running
    one. Return the order in which they end.
    """
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        share = ClientShare.BELOW if name == "below" else ClientShare.EVEN
        await collect(engine, request(request_id=name, priority=priority, client_share=share))
        order.append(name)

    engine = make(kind, gpt_oss, Role.AGGREGATED, max_batch_size=1, **args)
    async with started(engine):
        async with aclosing(as_stream(engine, ask(prompt_of(40), max_tokens=3000))) as running:
            await anext(running)
            names = (("late", 5), ("second", 0), ("third", 0), ("below", 0), ("first", -5))
            tasks = []
            for number, (name, priority) in enumerate(names, 1):
                tasks.append(asyncio.create_task(run(name, priority)))
                await check_stats(
                    engine, waiting=number, queued_prefill_tokens=number * len(request().token_ids)
                )
            assert engine.stats().context_tokens >= 40
        await asyncio.gather(*tasks)
    return order


SMALL_STEPS = (
    ("mock", {"prefill_tokens_per_step": 32, "prefill_token_s": 1e-5}),
    ("torch", {"prefill_chunk_tokens": 32, "max_num_tokens": 32}),
)


@pytest.mark.parametrize(("kind", "args"), SMALL_STEPS)
async def test_prompt_below_its_share_goes_before_the_rest_of_others(
    kind: str, args: dict[str, Any], gpt_oss: Path
) -> None:
    engine = make(kind, gpt_oss, Role.AGGREGATED, **args)
    async with started(engine):
        long = request(request_id="long", token_ids=prompt_of(2000))
        running = asyncio.create_task(collect(engine, long))
        await check_stats(engine, running=1)
        await collect(engine, request(client_share=ClientShare.BELOW))
        assert not running.done()
        await running


@pytest.mark.parametrize(("kind", "args"), SMALL_STEPS)
@pytest.mark.parametrize(
    ("share", "most"), [(ClientShare.ABOVE, 10), (ClientShare.EVEN, 32), (ClientShare.BELOW, 32)]
)
async def test_step_is_a_third_with_prompts_above_their_share_only(
    kind: str, args: dict[str, Any], share: ClientShare, most: int, gpt_oss: Path
) -> None:
    engine = make(kind, gpt_oss, Role.AGGREGATED, **args)
    assert isinstance(engine, MeasuresSteps)
    async with started(engine):
        await collect(engine, request(token_ids=prompt_of(200), client_share=share))
        assert max(step.prefill_tokens for step in engine.steps) == most


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (
            "mock",
            {
                "prefill_tokens_per_step": 16,
                "decodes_take_step_tokens": True,
                "prefill_token_s": 1e-5,
                "step_s": 0.005,
            },
        ),
        ("torch", {"max_num_tokens": 16, "max_batch_size": 16}),
    ],
)
async def test_prompt_above_its_share_goes_on_beside_streams(
    kind: str, args: dict[str, Any], gpt_oss: Path
) -> None:
    engine = make(kind, gpt_oss, Role.AGGREGATED, **args)
    async with started(engine):
        streams = [
            asyncio.create_task(collect(engine, ask(prompt_of(10, seed=seed), max_tokens=150)))
            for seed in range(8)
        ]
        await check_stats(engine, running=8, queued_prefill_tokens=0)
        await collect(engine, request(client_share=ClientShare.ABOVE))
        assert not any(stream.done() for stream in streams)
        await asyncio.gather(*streams)


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("mock", {"prefill_tokens_per_step": 512, "prefill_token_s": 1e-5}),
        ("torch", {"prefill_chunk_tokens": 512, "max_num_tokens": 512}),
    ],
)
async def test_long_prompt_does_not_starve_streams_if_elastic(
    kind: str, args: dict[str, Any], gpt_oss: Path
) -> None:
    most: dict[Role, int] = {}  # prompt tokens of a step without streams
    first: dict[Role, int] = {}  # those of the first step with streams
    for role in (Role.DECODE, Role.ELASTIC):
        engine = make(kind, gpt_oss, role, **args)
        assert isinstance(engine, MeasuresSteps)
        async with started(engine):
            await collect(engine, request(token_ids=prompt_of(1500)))
            streaming = asyncio.create_task(collect(engine, ask(prompt_of(40), max_tokens=60)))
            await check_stats(engine, running=1, queued_prefill_tokens=0)
            await collect(engine, request(token_ids=prompt_of(1500, seed=2)))
            await streaming
            most[role] = max(
                step.prefill_tokens for step in engine.steps if not step.decode_requests
            )
            mixed = (
                step.prefill_tokens
                for step in engine.steps
                if step.decode_requests and step.prefill_tokens
            )
            first[role] = next(mixed)
    # Later ones depend on the times of these steps.
    assert first[Role.ELASTIC] == 32
    assert first[Role.DECODE] > 400
    assert most == dict.fromkeys(most, 512)


@pytest.mark.parametrize(
    ("version", "args", "features"),
    [
        ("1.2.1", {}, ()),
        ("1.2.1", RANKS, ("dp_rank",)),
        ("1.3.0rc29", {}, ()),
        ("1.3.0rc29", RANKS | PRIORITIES, ("priority", "dp_rank")),
    ],
)
async def test_features_are_advertised_only_when_release_has_them(
    version: str, args: dict[str, Any], features: tuple[str, ...], gpt_oss: Path
) -> None:
    with fake_tensorrt_llm(version):
        engine = make("trtllm", gpt_oss, Role.AGGREGATED, **args)
        try:
            assert (await engine.start()).supported_features == features
            for fields in ({"priority": 1}, {"dp_rank": 1, "relax_dp_rank": True}):
                name = next(iter(fields))
                if name in features:
                    await collect(engine, request(**fields))
                else:
                    assert await rejected(engine, **fields) == name
            assert await rejected(engine, dp_rank=2) == "dp_rank"  # it would end the executor
            await collect(engine, request(conversation_id="a hint"))
        finally:
            await engine.aclose()


def recorded_calls(package: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return a list that receives the arguments of each call of `generate_async`."""
    calls: list[dict[str, Any]] = []
    generate_async = package.LLM.generate_async

    def recorded(self: Any, **call: Any) -> Any:
        calls.append(call)
        return generate_async(self, **call)

    recorded.__signature__ = generate_async.__signature__  # type: ignore[attr-defined]
    monkeypatch.setattr(package.LLM, "generate_async", recorded)
    return calls


async def test_arguments_pass_rank_conversation_and_priority(
    gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_tensorrt_llm("1.3.0rc29") as package:
        calls = recorded_calls(package, monkeypatch)
        engine = make("trtllm", gpt_oss, Role.AGGREGATED, **AFFINITY, **PRIORITIES)
        assert isinstance(engine, TrtllmEngine)
        async with started(engine):
            await collect(engine, request(dp_rank=1, conversation_id="c", priority=-(1 << 19)))
            await collect(engine, request())
    chosen = calls[-2]
    plain = calls[-1]
    assert (
        chosen["scheduling_params"].attention_dp_rank,
        chosen["scheduling_params"].attention_dp_relax,
    ) == (1, False)
    assert chosen["conversation_params"].conversation_id == "c"
    assert chosen["priority"] == 0.75  # of 0 to 1, higher values first
    assert not plain.keys() & {"scheduling_params", "conversation_params", "priority"}


@pytest.mark.parametrize(
    ("version", "is_passed"), [("1.1.0", False), ("1.2.1", True), ("1.3.0rc29", True)]
)
async def test_arguments_pass_trace_header_where_supported(
    version: str, is_passed: bool, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    with fake_tensorrt_llm(version) as package:
        calls = recorded_calls(package, monkeypatch)
        engine = make("trtllm", gpt_oss, Role.AGGREGATED)
        async with started(engine):
            await collect(engine, request(traceparent=parent))
            await collect(engine, request())
    traced, plain = calls[-2:]
    assert traced.get("trace_headers") == ({"traceparent": parent} if is_passed else None)
    assert "trace_headers" not in plain
