"""Runs a launcher with fake child processes that tests control."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import socketserver
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, TextIO

from dynamo_trtllm.config.deployment import DeploymentConfig
from dynamo_trtllm.launch.launcher import Launcher
from dynamo_trtllm.launch.process_output import ProcessOutput
from dynamo_trtllm.launch.process_specs import ProcessSpec, processes
from dynamo_trtllm.launch.readiness import ReadyAnswer
from dynamo_trtllm.launch.running_deployments import ProcessRecord

HOST = "127.0.0.1"
KILLED = -signal.SIGKILL


def worker(
    name: str, role: str, devices: Any, engine: str | None = "vllm", **more: Any
) -> dict[str, Any]:
    flags = {"model_path": "/m", **({"engine": engine} if engine else {}), **more.pop("flags", {})}
    return {"name": name, "disaggregation_mode": role, "devices": devices, "flags": flags, **more}


def deployment(*workers: dict[str, Any], **restart: Any) -> DeploymentConfig:
    services = {"etcd": "127.0.0.1:1", "nats": "nats://127.0.0.1:2"}
    return DeploymentConfig.model_validate(
        {"services": services, "workers": workers, "restart": restart}
    )


class FakeChild:
    """A child process that the test controls."""

    last_line = ""
    is_status_2_final = True
    is_overdue = False

    def __init__(
        self, spec: ProcessSpec, port: int, environ: Any, on_line: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.port = port
        self.say = on_line
        self._serves = asyncio.Event()
        self.record = ProcessRecord(
            name=spec.name, role=str(spec.role or spec.name), host=spec.host, port=port, pid=1
        )
        self.environ = {**environ, **spec.env}
        self.is_ready = self.is_terminating = False
        self.stop_rank = 1 if spec.is_frontend else 0
        self.times_asked = 0
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        ALL.append(self)

    @property
    def has_ended(self) -> bool:
        return self._end.done()

    def serve(self) -> None:
        self._serves.set()

    async def ready(self) -> ReadyAnswer:
        await self._serves.wait()
        run = children_named(self.spec.name).index(self) + 1
        return ReadyAnswer("serving", instance_id="" if self.spec.is_frontend else run * "ab")

    def die(self, status: int) -> None:
        self._end.set_result(status)

    def announce_stop(self) -> None:
        """Do nothing: a fake frontend has no /ready."""

    def terminate(self) -> None:
        if not self.is_terminating and not self.has_ended:
            self.is_terminating = True
            self.times_asked += 1

    async def stop(self) -> None:
        self.terminate()
        await self.ended()

    async def ended(self) -> int:
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        if not self.has_ended:
            self.die(KILLED)


ALL: list[FakeChild] = []
RUNS: list[LauncherRun] = []


async def until_ready(
    ask: partial[Any], within_s: float, on_wait: Callable[[str], None]
) -> ReadyAnswer:
    """Wait for the fake child at this port instead of an HTTP response."""
    _, port, _ = ask.args
    return await [child for child in ALL if child.port == port][-1].ready()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError(
        "condition not met; children: " + ", ".join(child.spec.name for child in ALL)
    )


def children_named(name: str) -> list[FakeChild]:
    return [child for child in ALL if child.spec.name == name]


def latest_child(name: str) -> FakeChild:
    return children_named(name)[-1]


async def settle() -> None:
    """Run the event loop until all tasks have done what they can without waiting."""
    for _ in range(200):
        await asyncio.sleep(0)


async def wait_for_start(name: str, number: int) -> FakeChild:
    await until(lambda: len(children_named(name)) == number)
    return latest_child(name)


class LauncherRun:
    """A running launcher and its output."""

    def __init__(self, of: DeploymentConfig, out: TextIO | None = None) -> None:
        self.out = io.StringIO()
        self.output = ProcessOutput(out or self.out, [])
        self.launcher = Launcher(of, processes(of), self.output, {})
        self.running = asyncio.create_task(self.launcher.run(self._on_ready))
        RUNS.append(self)

    async def _on_ready(self, serving: Any) -> bool:
        return False

    async def abort(self) -> None:
        """Stop the launcher after a failed test, whatever it waits for: its pending task would hang
        the event loop.
        """
        self.launcher._supervisor.stop()
        while not self.running.done():
            for child in ALL:
                child.kill()
            await asyncio.sleep(0)
        await asyncio.gather(self.running, return_exceptions=True)

    async def end(self) -> None:
        """Stop the launcher. Check that all children end and no new one starts."""
        number = len(ALL)
        self.launcher._supervisor.stop()

        def is_over() -> bool:
            for child in ALL:
                if child.is_terminating and not child.has_ended:
                    child.die(0)
            return self.running.done()

        await until(is_over)
        await self.running
        assert len(ALL) == number
        assert all(child.has_ended for child in ALL)


@contextlib.asynccontextmanager
async def run_launcher(*workers: dict[str, Any], **restart: Any) -> AsyncIterator[LauncherRun]:
    of = deployment(*workers, **restart)
    made = LauncherRun(of)
    await until(lambda: len(ALL) == 1 + sum(spec.count for spec in of.workers))
    for child in ALL:
        child.serve()
    await settle()
    yield made  # if it raises, the fixture `scripted` aborts the launcher
    if not made.running.done():
        await made.end()


@contextlib.contextmanager
def answering(*answers: bytes, greeting: bytes = b"") -> Iterator[int]:
    """The port of a server that gives one answer for each read, the last one again and again, and
    no end.
    """
    left = list(answers)

    class Serve(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):
                self.request.sendall(greeting)
                while self.request.recv(1 << 16):
                    self.request.sendall(left.pop(0) if len(left) > 1 else left[0])

    with socketserver.ThreadingTCPServer((HOST, 0), Serve) as server:
        # or its end would wait for connections that the loop of the test has to close
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            serving.join()


def http(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
