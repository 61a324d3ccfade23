"""`demo --failover`, with a server of the test in place of the frontend, and a process to kill."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from dynamo_trtllm.cli.failover import FAILOVER, Screen, show_failover
from dynamo_trtllm.config.deployment import checked_deployment
from dynamo_trtllm.launch.demonstration import ReadyDeployment
from dynamo_trtllm.launch.process_output import ProcessOutput
from dynamo_trtllm.launch.process_specs import ProcessSpec, processes
from dynamo_trtllm.launch.running_deployments import LaunchRecord, ProcessRecord
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.support.subprocesses import RunFailed

WORDS = ("One ", "two ", "three ", "four ", "five ", "six.")
MODEL = "m"
KILLED = "a1"
SUCCESSOR = "b2"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def specs(decode_workers: int = 2) -> list[ProcessSpec]:
    workers = [
        {"name": role, "disaggregation_mode": role, "flags": {"model": MODEL, "engine": "mock"}}
        for role in ("prefill", "decode")
    ]
    workers[1]["count"] = decode_workers
    return processes(checked_deployment({"frontend": {"http-port": 0}, "workers": workers}, "d"))


class FakeFrontend:
    """Streams the words of an answer. From the second stream on, it ends as a test wants."""

    def __init__(self, victim: subprocess.Popen[bytes]) -> None:
        self.victim = victim
        self.rest = WORDS[3:]  # what comes after the kill
        self.sends_error = False
        self.num_streams = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nX-Decode-Instance: " + KILLED.encode() + b"\r\n\r\n")
            self.num_streams += 1
            is_undisturbed = self.num_streams == 1
            for word in WORDS[:3]:
                self.send(writer, {"choices": [{"delta": {"content": word}}]})
            if not is_undisturbed:
                await asyncio.to_thread(self.victim.wait, 10)
            for word in WORDS[3:] if is_undisturbed else self.rest:
                self.send(writer, {"choices": [{"delta": {"content": word}}]})
            if self.sends_error and not is_undisturbed:
                self.send(writer, {"error": {"message": "no worker"}})
            self.send(writer, {"choices": [], "dynamo_trtllm": {"decode_instance": SUCCESSOR}})
            writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    def send(self, writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
        writer.write(b"data: " + json.dumps({"id": "chatcmpl-1"} | event).encode() + b"\n\n")


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def frontend(victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> FakeFrontend:
    monkeypatch.setenv("DYN_TRTLLM_RECORDER_DIR", "off")
    return FakeFrontend(victim)


@asynccontextmanager
async def deployed(frontend: FakeFrontend, stream: io.StringIO) -> AsyncIterator[ReadyDeployment]:
    server = await asyncio.start_server(frontend.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    common = {"host": "127.0.0.1", "port": port}
    records = [
        ProcessRecord(
            name="decode-1", role="decode", pid=frontend.victim.pid, instance_id=KILLED, **common
        ),
        ProcessRecord(name="decode-2", role="decode", pid=1, instance_id=SUCCESSOR, **common),
    ]
    record = LaunchRecord(pid=1, namespace="n", processes=records)
    listening = ProcessRecord(name="frontend", role="frontend", pid=1, **common)
    async with server:
        yield ReadyDeployment(ProcessOutput(stream, []), specs(), record, listening)


async def test_failover_kills_the_worker_and_names_the_next(frontend: FakeFrontend) -> None:
    stream = io.StringIO()
    async with deployed(frontend, stream) as deployment:
        await show_failover(deployment)
    said = stream.getvalue()
    assert frontend.victim.returncode == -9
    assert f"kill -9 {frontend.victim.pid}: decode-1" in said
    assert "✓ the same text as undisturbed: 28 characters, the rest from decode-2" in said
    assert re.search(r"✓ longest pause \d\.\d\d s", said)
    assert "dynamo-trtllm explain chatcmpl-1" in said
    assert "\x1b" not in said
    assert max(map(len, said.splitlines())) <= 100


async def test_failover_with_another_text_fails(frontend: FakeFrontend) -> None:
    frontend.rest = ("and ", "so ", "on.")
    stream = io.StringIO()
    async with deployed(frontend, stream) as deployment:
        with pytest.raises(RunFailed, match="the text differs"):
            await show_failover(deployment)
    assert "✗ the text differs" in stream.getvalue()


async def test_failover_with_a_long_pause_fails(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_trtllm.cli.failover.MAX_PAUSE_S", 0.0)
    async with deployed(frontend, io.StringIO()) as deployment:
        with pytest.raises(RunFailed, match="paused for more than"):
            await show_failover(deployment)


async def test_failover_when_the_stream_fails_names_the_error(frontend: FakeFrontend) -> None:
    frontend.sends_error = True
    async with deployed(frontend, io.StringIO()) as deployment:
        with pytest.raises(RunFailed, match="ended with an error: no worker"):
            await show_failover(deployment)


def test_failover_needs_two_decode_workers() -> None:
    FAILOVER.check(specs())
    with pytest.raises(ConfigError, match="needs two decode workers, but the deployment has 1"):
        FAILOVER.check(specs(1))


def test_screen_breaks_lines_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    screen = Screen(ProcessOutput(stream, []))
    for piece in ("Pre", "fill and de", "code run on sep", "arate workers."):
        screen.text(piece)
    screen.end_text()
    assert stream.getvalue() == "  Prefill and decode\n  run on separate\n  workers.\n"


@pytest.mark.parametrize("has_colors", [True, False])
def test_screen_counts_a_pause_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, has_colors: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", "" if has_colors else "1")
    stream = Terminal()
    screen = Screen(ProcessOutput(stream, []))
    screen.begin_pause("gone")
    screen.count_pause(0.5)
    screen.end_pause(0.93)
    said = stream.getvalue()
    assert "… 0.5 s" in said
    assert "after 0.93 s" in said
    assert ("\x1b[31m✗ gone" in said) == has_colors


def test_screen_escapes_what_a_model_sends() -> None:
    stream = io.StringIO()
    screen = Screen(ProcessOutput(stream, []))
    screen.text("a\x1b[2Jb ")
    assert stream.getvalue() == "  a\\x1b[2Jb"
