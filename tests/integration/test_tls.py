"""TLS of the HTTP server over real sockets: handshakes, certificates, and clients that misuse it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo_trtllm.support.http_server.exchange import HttpRequest, HttpResponse
from dynamo_trtllm.support.http_server.limits import ConnectionTiming
from dynamo_trtllm.support.tls import ServerCertificate
from dynamo_trtllm.support.tls_files import TlsFiles
from tests.integration.http_serving import GET, LARGE, Held, serving
from tests.kit.certificates import (
    client_context,
    make_certificate,
    shared_certificate,
    shared_server_certificate,
    trusting,
)
from tests.kit.waiting import SOON_S

MANY_KEYS = 1000  # more than the server answers
CLOSE = GET.replace(b"Host", b"Connection: close\r\nHost")


class Counted:
    """A server certificate, and the outcomes of the handshakes with it."""

    def __init__(self, files: TlsFiles | None = None) -> None:
        self.outcomes: list[str] = []
        self.certificate = ServerCertificate(files or shared_certificate())
        self.certificate.count = self._count

    def _count(self, metric: str, outcome: str) -> None:
        assert metric in ("tls_handshakes_total", "tls_reloads_total")
        self.outcomes.append(outcome)


async def answer(request: HttpRequest, response: HttpResponse) -> None:
    response.send_json(200, {"certificate": request.has_client_certificate})


async def ask(port: int, context: ssl.SSLContext | None) -> bytes:
    """Send a request. Return what the server has sent before it closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(CLOSE)
    received = await reader.read()
    writer.transport.abort()
    return received


def in_a_thread(port: int, exchange: Callable[[ssl.SSLSocket], bytes]) -> bytes:
    """Return what a client gets that uses no event loop."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=SOON_S)
    context = client_context()
    with context.wrap_socket(
        raw, server_hostname="127.0.0.1", suppress_ragged_eofs=False
    ) as connected:
        return exchange(connected)


async def test_response_read_slowly_is_whole() -> None:
    async def large(request: HttpRequest, response: HttpResponse) -> None:
        response.send(200, LARGE)

    def read(connected: ssl.SSLSocket) -> bytes:
        connected.sendall(CLOSE)
        received = bytearray()
        while data := connected.recv(1 << 20):
            received += data
            time.sleep(0.0002)
        return bytes(received)

    timing = ConnectionTiming(stall_s=0.5)
    async with serving(large, certificate=shared_server_certificate(), timing=timing) as served:
        received = await asyncio.to_thread(in_a_thread, served.port, read)
    assert received.endswith(b"\r\n\r\n" + LARGE)


async def test_request_in_small_records_is_read() -> None:
    def send(connected: ssl.SSLSocket) -> bytes:
        for byte in GET:
            connected.sendall(bytes([byte]))
        return connected.recv(1 << 16)

    async with serving(answer, certificate=shared_server_certificate()) as served:
        received = await asyncio.to_thread(in_a_thread, served.port, send)
    assert received.startswith(b"HTTP/1.1 200 ")


async def test_client_without_tls_is_answered_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "dynamo_trtllm")
    counted = Counted()
    async with serving(answer, certificate=counted.certificate) as served:
        received = await ask(served.port, None)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"this port needs TLS" in received
    assert counted.outcomes == ["not_tls"]
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


async def test_silent_client_ends_after_the_handshake_time() -> None:
    counted = Counted()
    timing = ConnectionTiming(handshake_s=0.05)
    async with serving(answer, certificate=counted.certificate, timing=timing) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"\x16\x03\x01")  # the beginning of a handshake
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    assert counted.outcomes == ["timeout"]


async def test_silent_clients_take_no_connection_from_others() -> None:
    counted = Counted()
    async with serving(
        answer, certificate=counted.certificate, max_connections=2, reserved_connections=1
    ) as served:
        silent = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(8)]
        assert (await ask(served.port, client_context())).startswith(b"HTTP/1.1 200 ")
        assert len(served.server.open) <= 3  # the limit holds for handshakes, too
        for _, writer in silent:
            writer.transport.abort()
    assert counted.outcomes.count("disconnected") == 8


@pytest.mark.parametrize("way", ["reset", "reset while paused", "close_notify"])
async def test_client_leaving_cancels_its_handler(way: str) -> None:
    begun = asyncio.Event()
    cancelled = asyncio.Event()

    async def hold(request: HttpRequest, response: HttpResponse) -> None:
        response.cancel_on_disconnect()
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    incoming = ssl.MemoryBIO()
    outgoing = ssl.MemoryBIO()
    client = client_context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    async with serving(hold, certificate=shared_server_certificate()) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(1 << 16))
        # Behind eight requests that wait, nothing more is received.
        client.write(GET * 20 if way == "reset while paused" else GET)
        writer.write(outgoing.read())
        await begun.wait()
        if way == "close_notify":
            with pytest.raises(ssl.SSLWantReadError):
                client.unwrap()
            writer.write(outgoing.read())  # and the socket stays open
        else:
            writer.transport.abort()
        await asyncio.wait_for(cancelled.wait(), SOON_S)
        writer.transport.abort()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_versions_before_1_2_are_rejected() -> None:
    counted = Counted()
    context = client_context_of(ssl.TLSVersion.TLSv1_1)
    async with serving(answer, certificate=counted.certificate) as served:
        with pytest.raises(OSError, match=r"(?i)protocol|alert"):
            await ask(served.port, context)
        context = client_context_of(ssl.TLSVersion.TLSv1_2)
        assert (await ask(served.port, context)).startswith(b"HTTP/1.1 200 ")
    assert counted.outcomes == ["failed", "ok"]


def client_context_of(version: ssl.TLSVersion) -> ssl.SSLContext:
    """Return a context of a client that knows no later version."""
    context = trusting(shared_certificate())
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = version
    return context


async def test_alpn_selects_http_1_1() -> None:
    context = trusting(shared_certificate())
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with serving(answer, certificate=shared_server_certificate()) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        selected = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        writer.transport.abort()
    assert selected == "http/1.1"


async def test_changed_certificate_is_for_new_connections(tmp_path: Path) -> None:
    files = make_certificate(tmp_path)
    counted = Counted(files)
    held = Held()
    async with serving(held, certificate=counted.certificate) as served:
        before = trusting(files)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=before)
        writer.write(CLOSE)
        await held.begun.wait()
        replace_certificate(files, make_certificate(tmp_path, "new"))
        await counted.certificate.reload()
        held.go.set()
        assert (await ask(served.port, trusting(files))).startswith(b"HTTP/1.1 200 ")
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(served.port, before)
        # The request that ran goes on.
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert counted.outcomes[:3] == ["ok", "ok", "ok"]


def replace_certificate(files: TlsFiles, new: TlsFiles) -> None:
    os.replace(new.certificate, files.certificate)
    os.replace(new.key, files.key)


async def test_wrong_certificate_keeps_the_former_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_certificate(tmp_path)
    counted = Counted(files)
    async with serving(answer, certificate=counted.certificate) as served:
        context = trusting(files)
        os.replace(make_certificate(tmp_path, "new").key, files.key)  # of another certificate
        for _ in range(2):
            await counted.certificate.reload()
        assert (await ask(served.port, context)).startswith(b"HTTP/1.1 200 ")
    assert counted.outcomes == ["failed", "ok"]
    assert "do not belong together" in caplog.text


async def test_client_certificates_of_the_ca_are_accepted(tmp_path: Path) -> None:
    own, known, unknown = (make_certificate(tmp_path, name) for name in ("own", "known", "other"))
    counted = Counted(TlsFiles(own.certificate, own.key, known.certificate))
    async with serving(answer, certificate=counted.certificate) as served:
        context = trusting(own)
        assert b'"certificate":false' in await ask(served.port, context)
        context.load_cert_chain(known.certificate, known.key)
        assert b'"certificate":true' in await ask(served.port, context)
        context = trusting(own)
        context.load_cert_chain(unknown.certificate, unknown.key)
        with suppress(OSError):
            assert await ask(served.port, context) == b""
    assert counted.outcomes == ["ok", "ok", "client_certificate"]


async def test_client_that_always_asks_for_new_keys_is_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def ask_for_keys(port: int) -> None:
        command = ["openssl", "s_client", "-tls1_3", "-connect", f"127.0.0.1:{port}"]
        client = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        # The client ends when it is cut, maybe while its input is closed at the end of the block.
        with suppress(BrokenPipeError), client:
            assert client.stdin is not None
            assert client.stderr is not None
            for _ in range(MANY_KEYS):
                client.stdin.write(b"K\n")  # a command: ask for new keys
                client.stdin.flush()
                # It executes one command of what it reads at once, and says when it does so.
                while (line := client.stderr.readline()) not in (b"KEYUPDATE\n", b""):
                    pass
                if not line:
                    break
            client.kill()

    caplog.set_level(logging.DEBUG, "dynamo_trtllm")
    async with serving(answer, certificate=shared_server_certificate()) as served:
        await asyncio.to_thread(ask_for_keys, served.port)
    assert "asked for new keys too often" in caplog.text
