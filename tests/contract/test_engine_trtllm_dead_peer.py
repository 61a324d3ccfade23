"""A prefill worker that is gone fails the decode calls that need its KV, and not the decode engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_trtllm.engines.trtllm import transfers
from dynamo_trtllm.errors import TransferFailed
from dynamo_trtllm.messages import Phase, Role
from tests.engines import (
    answer,
    ask,
    check_nothing_left,
    check_stats,
    collect,
    make,
    prefill_params,
    prefill_then_decode,
    prompt_of,
    started,
    tokens,
)
from tests.fakes_path import fake_tensorrt_llm
from tests.waiting import SOON_S

PROMPT = prompt_of(70)


@pytest.fixture(autouse=True)
def package() -> Iterator[Any]:
    with fake_tensorrt_llm("1.3.0rc29") as found:
        yield found


def engine(folder: Path, role: Role) -> Any:
    return make("trtllm", folder, role, transceiver="NIXL", ttl_s=60.0)


async def test_decode_when_the_prefill_worker_is_gone_then_transfer_failed_and_the_engine_goes_on(
    gpt_oss: Path,
) -> None:
    prefill, decode = engine(gpt_oss, Role.PREFILL), engine(gpt_oss, Role.DECODE)
    async with started(decode):
        async with started(prefill):
            expected = await prefill_then_decode(prefill, decode, PROMPT)
            kv_params = await prefill_params(prefill, PROMPT)
        await asyncio.sleep(transfers._PROBE_VALID_S)  # the last probe is valid for so long
        for _ in range(2):
            with pytest.raises(TransferFailed, match="unreachable"):
                await collect(decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
        async with asyncio.timeout(SOON_S):
            assert await answer(decode, PROMPT) == tokens(expected)
        await check_nothing_left(decode)


async def test_decode_when_canceled_while_its_peer_is_probed_then_nothing_is_submitted(
    gpt_oss: Path, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probing, answers, submitted = asyncio.Event(), asyncio.Event(), []

    async def connect(host: str, port: int) -> None:
        probing.set()
        await answers.wait()

    monkeypatch.setattr(transfers, "_connect", connect)
    prefill, decode = engine(gpt_oss, Role.PREFILL), engine(gpt_oss, Role.DECODE)
    async with started(prefill, decode):
        kv_params = await prefill_params(prefill, PROMPT)
        monkeypatch.setattr(package.LLM, "generate_async", lambda *_, **call: submitted.append(call))
        handle = decode.generate(ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params), lambda _: None)
        await asyncio.wait_for(probing.wait(), SOON_S)
        handle.cancel()
        answers.set()
        await check_stats(decode, running=0)
    assert submitted == []


async def test_probe_when_many_calls_need_one_endpoint_then_it_is_connected_to_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[tuple[str, int]] = []

    async def connect(host: str, port: int) -> None:
        connected.append((host, port))

    monkeypatch.setattr(transfers, "_connect", connect)
    probe = transfers.EndpointProbe()
    await asyncio.gather(*(probe.check("tcp://[::1]:5") for _ in range(10)))
    await probe.check("tcp://host:6")
    await probe.check("ipc:///tmp/x")
    assert connected == [("::1", 5), ("host", 6)]
