"""Real processes as a user starts them: frontends and workers through `python -m`, HTTP as the only way in.

Their log lines are the events that tests wait for; nothing inside a process is touched.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from dynamo_trtllm.subprocesses.child import spawn

TINY = "tiny-gpt-oss"
START_TIMEOUT_S = 100.0  # processes that import much, several at once, beside other busy ones
STOP_TIMEOUT_S = 10.0


class Process:
    """One `python -m dynamo_trtllm…`, or `command`, whose log is read line by line."""

    def __init__(
        self, module: str, argv: Sequence[str], env: Mapping[str, str], *, command: Sequence[str] | None = None
    ) -> None:
        self._child = spawn([*(command or (sys.executable, "-m", module)), *argv], env=env, stderr=subprocess.PIPE)
        self.lines: list[str] = []
        self._is_over = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"log of {module}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stderr is not None
        with self._child.stderr as log:
            for line in log:
                with self._news:
                    self.lines.append(line.decode(errors="replace").rstrip())
                    self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_over(self) -> bool:
        """Whether its log has ended, and it with it."""
        return self._is_over

    def wait_for(self, pattern: str, timeout_s: float = START_TIMEOUT_S, after: int = 0) -> re.Match[str]:
        """The first match in the log from line number `after` on. Fails with the log when there will be none."""
        expected = re.compile(pattern)

        def found() -> re.Match[str] | None:
            return next((match for line in self.lines[after:] if (match := expected.search(line))), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._is_over, timeout_s)
            match = found()
        if match is None:
            why = "the process ended" if self._is_over else f"waited {timeout_s:g} s"
            raise AssertionError(f"no line matches {pattern!r} ({why}); the log:\n" + "\n".join(self.lines[-40:]))
        return match

    def url(self) -> str:
        """Of the port that it logged."""
        port = self.wait_for(r"(?:listening on|health at) http://\S+:(\d+)").group(1)
        return f"http://127.0.0.1:{port}"

    def instance(self) -> str:
        """A worker's instance id, once it serves."""
        return self.wait_for(r"serving as instance ([0-9a-f]+)").group(1)

    def send(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """The exit status."""
        status = self._child.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def stop(self) -> None:
        """SIGTERM, then SIGKILL. Idempotent."""
        self._child.terminate()
        try:
            self.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self.wait()


class Cluster:
    """A frontend and the workers that were added, in a namespace of their own."""

    def __init__(self, etcd: str, nats: str, namespace: str, flags: Sequence[str] = ()) -> None:
        """`flags`: of the frontend."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        self.env = kept | {"ETCD_ENDPOINTS": etcd, "NATS_SERVER": nats, "DYN_NAMESPACE": namespace}
        self._processes: list[Process] = []
        self.frontend = self._start("dynamo_trtllm.frontend", ["--http-port", "0", *flags])

    def _start(self, module: str, argv: Sequence[str], env: Mapping[str, str] = {}) -> Process:
        self._processes.append(Process(module, argv, {**self.env, **env}))
        return self._processes[-1]

    def torch(
        self, role: str, name: str = TINY, *flags: str, model: str = TINY, env: Mapping[str, str] = {}
    ) -> Process:
        argv = ["--engine", "torch", "--model", model, "--served-model-name", name, *flags]
        return self._worker(role, argv, env)

    def mock(self, role: str, name: str, *flags: str, **engine_args: Any) -> Process:
        argv = ["--engine", "mock", "--model", name, "--lease-ttl-s", "1", *flags]
        return self._worker(role, [*argv, "--override-engine-args", json.dumps(engine_args)])

    def script(self, command: Sequence[str], argv: Sequence[str], env: Mapping[str, str] = {}) -> Process:
        """A program of somebody's own that serves."""
        self._processes.append(Process(command[-1], argv, {**self.env, **env}, command=command))
        return self._processes[-1]

    def trtllm(self, role: str, name: str, model: str, env: Mapping[str, str], **engine_args: Any) -> Process:
        argv = ["--engine", "trtllm", "--model", model, "--served-model-name", name]
        return self._worker(role, [*argv, "--override-engine-args", json.dumps(engine_args)], env)

    def _worker(self, role: str, argv: Sequence[str], env: Mapping[str, str] = {}) -> Process:
        return self._start("dynamo_trtllm", [*argv, "--disaggregation-mode", role, "--system-port", "0"], env)

    @contextmanager
    def client(self, timeout_s: float = START_TIMEOUT_S) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=self.frontend.url(), timeout=timeout_s, trust_env=False) as client:
            yield client

    def until_ready(self, *names: str) -> None:
        """All these models can be served."""
        for process in self._processes[1:]:
            process.instance()
        for name in names:
            self.until_status(name, 200)

    def until_status(self, name: str, status: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """The frontend says 200 (ready) or 503 (not ready) of this model."""
        with self.client() as client:
            until(lambda: client.get(f"/v1/models/{name}/ready").status_code == status, timeout_s)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send(signal.SIGTERM)
        for process in reversed(self._processes):
            process.stop()


def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until the condition held. Fails when it does not in time."""
    begun = time.monotonic()
    pause_s = 0.01
    while not condition():
        waited = time.monotonic() - begun
        assert waited < timeout_s, f"not so within {timeout_s:g} s"
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.5)
    return time.monotonic() - begun


def gauges(worker: Process) -> dict[str, float]:
    """A worker's unlabelled metrics, short names."""
    text = httpx.get(f"{worker.url()}/metrics", trust_env=False).text
    pairs = re.findall(r"^dynamo_trtllm_(\w+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in pairs}


def events(lines: Iterator[str]) -> Iterator[Any]:
    """The JSON of server-sent events, up to `[DONE]`, which must come."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            assert line.startswith("data: "), line
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def command(argv: Sequence[str], env: Mapping[str, str], timeout_s: float = START_TIMEOUT_S) -> tuple[int, list[str]]:
    """Runs a module to its end: exit status and the lines of stderr."""
    done = subprocess.run(
        [sys.executable, "-m", *argv], env=dict(env), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, done.stderr.splitlines()


def write_yaml(folder: Path, text: str) -> str:
    path = folder / "engine.yaml"
    path.write_text(text)
    return str(path)
