"""The proxy file `deploy/proxy/nginx.conf`, run by nginx in front of our HTTP server."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamo_trtllm.support.http_server.exchange import Handler, HttpRequest, HttpResponse
from dynamo_trtllm.support.network.addresses import free_ports
from tests.integration.http_serving import GET, serving
from tests.kit.certificates import client_context, shared_certificate
from tests.kit.waiting import SOON_S

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "proxy" / "nginx.conf"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt install nginx-light)"),
]


def own_file(folder: Path, port: int, server_port: int) -> list[str]:
    """Write the file with the addresses and the certificate of a test. Return nginx's arguments."""
    text = CONFIGURATION.read_text()
    files = shared_certificate()
    for of_file, own in {
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "server 127.0.0.1:8000;": f"server 127.0.0.1:{server_port};",
        "/etc/nginx/tls/tls.crt": str(files.certificate),
        "/etc/nginx/tls/tls.key": str(files.key),
        "worker_processes auto;": "worker_processes 1;",
    }.items():
        assert text.count(of_file) == 1
        text = text.replace(of_file, own)
    path = folder / "nginx.conf"
    path.write_text(text)
    return [str(NGINX), "-c", str(path), "-g", f"pid {folder}/pid; daemon off;"]


@asynccontextmanager
async def proxy(folder: Path, handler: Handler) -> AsyncIterator[int]:
    """Yield the port of nginx in front of a server."""
    port = free_ports()
    async with serving(handler, keeps_all_headers=True) as served:
        command = own_file(folder, port, served.port)
        tested = await asyncio.create_subprocess_exec(*command, "-t")
        assert await asyncio.wait_for(tested.wait(), SOON_S) == 0
        nginx = await asyncio.create_subprocess_exec(*command)
        try:
            await until_connected(port)
            yield port
        finally:
            nginx.terminate()
            await nginx.wait()


async def until_connected(port: int) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.transport.abort()
                return


async def send(port: int, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_context())
    writer.write(request)
    return reader, writer


async def test_streams_pass_at_once_and_end_with_their_clients(tmp_path: Path) -> None:
    go = asyncio.Event()
    cancelled = asyncio.Event()
    clients: list[bytes] = []

    async def stream(request: HttpRequest, response: HttpResponse) -> None:
        response.cancel_on_disconnect()
        clients.append(dict(request.headers.pairs())[b"x-forwarded-for"])
        response.start_events({})
        await response.send_events(b"data: 1\n\n")
        try:
            await go.wait()
            await response.send_events(b"data: 2\n\n")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with proxy(tmp_path, stream) as port:
        request = GET.replace(b"Host", b"X-Forwarded-For: 6.6.6.6\r\nHost")
        reader, writer = await send(port, request)
        await reader.readuntil(b"data: 1\n\n")  # the second event was not sent yet
        go.set()
        await reader.readuntil(b"data: 2\n\n")
        writer.transport.abort()
        await asyncio.wait_for(cancelled.wait(), SOON_S)
    assert clients == [b"127.0.0.1"]


async def test_errors_of_the_proxy_have_the_form_of_ours(tmp_path: Path) -> None:
    async def answer(request: HttpRequest, response: HttpResponse) -> None:
        response.send_json(200, {})

    async with proxy(tmp_path, answer) as port:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 9000000\r\n\r\n"
        reader, writer = await send(port, head)
        too_large = await reader.readuntil(b"}}\n")
        writer.transport.abort()
        reader, writer = await send(port, GET.replace(b"GET /", b"GET /metrics"))
        hidden = await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
    assert too_large.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"payload_too_large"' in too_large
    assert hidden.startswith(b"HTTP/1.1 404 ")


async def test_frontend_that_is_gone_is_a_retryable_error(tmp_path: Path) -> None:
    port = free_ports(2)
    nginx = await asyncio.create_subprocess_exec(*own_file(tmp_path, port, port + 1))
    try:
        await until_connected(port)
        reader, writer = await send(port, GET)
        received = await reader.readuntil(b"}}\n")
        writer.transport.abort()
    finally:
        nginx.terminate()
        await nginx.wait()
    assert received.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1" in received
    assert b'"code":"unreachable"' in received
