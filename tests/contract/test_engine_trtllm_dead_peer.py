"""A prefill worker that is gone fails the decode calls that need its KV, and not the decode
engine.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_trtllm.engines.trtllm import endpoint_probe
from dynamo_trtllm.protocol.errors import TransferFailed, TransferMismatch
from dynamo_trtllm.protocol.messages import Phase, Role
from dynamo_trtllm.testing.engine_requests import (
    ask,
    check_nothing_left,
    check_stats,
    collect,
    prompt_of,
    started,
    tokens,
)
from tests.kit.engines import answer, make, prefill_params, prefill_then_decode
from tests.kit.fake_packages import fake_tensorrt_llm
from tests.kit.waiting import SOON_S

PROMPT = prompt_of(70)


@pytest.fixture(autouse=True)
def package() -> Iterator[Any]:
    with fake_tensorrt_llm("1.3.0rc29") as found:
        yield found


def engine(folder: Path, role: Role) -> Any:
    return make("trtllm", folder, role, transceiver="NIXL", ttl_s=60.0)


async def test_decode_when_prefill_worker_is_gone_then_transfer_failed(gpt_oss: Path) -> None:
    prefill = engine(gpt_oss, Role.PREFILL)
    decode = engine(gpt_oss, Role.DECODE)
    async with started(decode):
        async with started(prefill):
            expected = await prefill_then_decode(prefill, decode, PROMPT)
            kv_params = await prefill_params(prefill, PROMPT)
        await asyncio.sleep(endpoint_probe._PROBE_VALID_S)  # the last probe is valid for so long
        for _ in range(2):
            with pytest.raises(TransferFailed, match="unreachable"):
                await collect(decode, ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params))
        async with asyncio.timeout(SOON_S):
            assert await answer(decode, PROMPT) == tokens(expected)
        await check_nothing_left(decode)


async def test_decode_canceled_during_peer_probe_is_still_submitted(
    gpt_oss: Path, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its fetch frees the KV at the prefill worker."""
    probing = asyncio.Event()
    answers = asyncio.Event()
    submitted = []

    async def connect(host: str, port: int, timeout_s: float) -> None:
        probing.set()
        await answers.wait()

    monkeypatch.setattr(endpoint_probe, "_connect", connect)
    prefill = engine(gpt_oss, Role.PREFILL)
    decode = engine(gpt_oss, Role.DECODE)
    async with started(prefill, decode):
        kv_params = await prefill_params(prefill, PROMPT)
        monkeypatch.setattr(
            package.LLM, "generate_async", lambda *_, **call: submitted.append(call)
        )
        handle = decode.generate(
            ask(PROMPT, phase=Phase.DECODE, kv_params=kv_params), lambda _: None
        )
        await asyncio.wait_for(probing.wait(), SOON_S)
        handle.cancel()
        answers.set()
        await check_stats(decode, running=0)
    assert len(submitted) == 1


async def test_decode_rejects_kv_of_the_other_transceiver(gpt_oss: Path) -> None:
    """Even if its worker registered the same settings, as a build may have that chooses another by
    itself.
    """
    prefill = engine(gpt_oss, Role.PREFILL)
    decode = make("trtllm", gpt_oss, Role.DECODE, transceiver="UCX")
    async with started(prefill, decode):
        kv_params = await prefill_params(prefill, PROMPT)
        own = msgspec.structs.replace(kv_params, kv_compat=decode._kv_compat)  # type: ignore[attr-defined]
        for sent in (kv_params, own):
            with pytest.raises(TransferMismatch):
                await collect(decode, ask(PROMPT, phase=Phase.DECODE, kv_params=sent))
        await check_nothing_left(decode)


async def test_probe_connects_once_for_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[tuple[str, int]] = []

    async def connect(host: str, port: int, timeout_s: float) -> None:
        connected.append((host, port))

    monkeypatch.setattr(endpoint_probe, "_connect", connect)
    probe = endpoint_probe.EndpointProbe()
    await asyncio.gather(*(probe.check("tcp://[::1]:5") for _ in range(10)))
    await probe.check("tcp://host:6")
    await probe.check("ipc:///tmp/x")
    assert connected == [("::1", 5), ("host", 6)]


@contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """Yield the address of a socket that sends `answer` to the first connection; None: its process
    is frozen.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer or b"")

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "no answer within"),
        (b"HTTP/1.1 400", "another program listens"),
        (b"", "closed the connection"),
    ],
)
async def test_probe_when_address_is_no_transceiver_then_fails(
    answer: bytes | None, reason: str
) -> None:
    probe = endpoint_probe.EndpointProbe(timeout_s=SOON_S if answer is not None else 0.05)
    with (
        listener(answer) as address,
        pytest.raises(TransferFailed, match=f"{address} is unreachable: .*{reason}"),
    ):
        await probe.check(address)


async def test_probe_accepts_a_zeromq_greeting() -> None:
    with listener(bytes.fromhex("ff00000000000000017f03")) as address:  # of libzmq 4.3.5
        await endpoint_probe.EndpointProbe().check(address)
