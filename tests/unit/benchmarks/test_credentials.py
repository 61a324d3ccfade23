"""Benchmarks send the API key of the environment, so that they can measure frontends with keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.client import choose_model
from benchmarks.credentials import VARIABLE
from benchmarks.load_client import Client, Load
from dynamo_trtllm.support.network.addresses import free_ports

_UNAUTHORIZED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def rejecting_server(heads: list[bytes]) -> AsyncIterator[str]:
    """Run a server that keeps the heads of requests and answers 401. Return its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(_UNAUTHORIZED)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


async def test_models_are_asked_for_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    heads: list[bytes] = []
    async with rejecting_server(heads) as url:
        with pytest.raises(SystemExit, match=VARIABLE):
            await asyncio.to_thread(choose_model, url, None)
    assert len(heads) == 1


@pytest.mark.parametrize("variable", ["first-key", "first-key, second-key"])
async def test_load_sends_the_first_key_of_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, variable)
    heads: list[bytes] = []
    async with rejecting_server(heads) as url:
        [record] = await Client(Load(url=url, model="m", requests=1)).run()
    assert record.status == 401
    assert b"\r\nAuthorization: Bearer first-key\r\n" in heads[0]


async def test_load_without_a_key_sends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    heads: list[bytes] = []
    async with rejecting_server(heads) as url:
        await Client(Load(url=url, model="m", requests=1)).run()
    assert b"Authorization" not in heads[0]


async def test_unknown_key_ends_with_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "revoked-key")
    heads: list[bytes] = []
    async with rejecting_server(heads) as url:
        with pytest.raises(SystemExit, match=f"Set {VARIABLE}"):
            await asyncio.to_thread(choose_model, url, None)
    assert b"Bearer revoked-key" in heads[0]


def test_without_a_server_the_error_is_that_of_the_socket() -> None:
    url = f"http://127.0.0.1:{free_ports(1)}"
    with pytest.raises(SystemExit, match=r"No server answers at .* \(\[Errno 111\] Connection"):
        choose_model(url, None)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
)
async def test_another_server_is_named(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(SystemExit, match="not the address of an OpenAI-compatible server"):
            await asyncio.to_thread(choose_model, url, None)
