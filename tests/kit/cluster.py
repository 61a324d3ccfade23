"""Starts frontends and workers as processes, like a user does, and waits for their log lines and
HTTP responses.
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
from typing import Any, NamedTuple

import httpx

from dynamo_trtllm.support.subprocesses import spawn

TINY = "tiny-gpt-oss"
START_TIMEOUT_S = 100.0  # several processes import large packages at the same time
STOP_TIMEOUT_S = 10.0
# Of every httpx client and call: to read the certificates for TLS, which nothing here speaks, takes
# each 50 ms of CPU.
PLAIN: Any = {"trust_env": False, "verify": False}


class Process:
    """One `python -m` process, or another command, whose log is read line by line."""

    def __init__(
        self,
        module: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        command: Sequence[str] | None = None,
    ) -> None:
        self._child = spawn(
            [*(command or (sys.executable, "-m", module)), *argv], env=env, stderr=subprocess.PIPE
        )
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
        """Whether the log has ended."""
        return self._is_over

    def wait_for(
        self, pattern: str, timeout_s: float = START_TIMEOUT_S, after: int = 0
    ) -> re.Match[str]:
        """Wait for a log line from number `after` on.

        Return the match. Fail with the log if there is none.
        """
        expected = re.compile(pattern)

        def found() -> re.Match[str] | None:
            return next(
                (match for line in self.lines[after:] if (match := expected.search(line))), None
            )

        with self._news:
            self._news.wait_for(lambda: found() or self._is_over, timeout_s)
            match = found()
        if match is None:
            reason = "the process exited" if self._is_over else f"waited {timeout_s:g} s"
            raise AssertionError(
                f"no line matches {pattern!r} ({reason}); log:\n" + "\n".join(self.lines[-40:])
            )
        return match

    def url(self) -> str:
        """Return the URL with the port in the log."""
        port = self.wait_for(r"(?:listening on|health at) http://\S+:(\d+)").group(1)
        return f"http://127.0.0.1:{port}"

    def instance(self) -> str:
        """Wait until the worker is ready. Return its instance id."""
        return self.wait_for(r"serving as instance ([0-9a-f]+)").group(1)

    def send(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """Wait for the exit status."""
        status = self._child.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after a timeout. Idempotent."""
        self._child.terminate()
        try:
            self.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self.wait()


class Cluster:
    """A frontend and workers in a separate namespace."""

    def __init__(self, etcd: str, nats: str, namespace: str, flags: Sequence[str] = ()) -> None:
        """Start a frontend with these flags."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("DYN_")
        }
        self.env = inherited | {
            "ETCD_ENDPOINTS": etcd,
            "NATS_SERVER": nats,
            "DYN_NAMESPACE": namespace,
        }
        self._processes: list[Process] = []
        self.frontend = self._start("dynamo_trtllm.frontend", ["--http-port", "0", *flags])

    def _start(self, module: str, argv: Sequence[str], env: Mapping[str, str] = {}) -> Process:
        self._processes.append(Process(module, argv, {**self.env, **env}))
        return self._processes[-1]

    def torch(
        self,
        role: str,
        name: str = TINY,
        *flags: str,
        model: str = TINY,
        env: Mapping[str, str] = {},
    ) -> Process:
        argv = ["--engine", "torch", "--model", model, "--served-model-name", name, *flags]
        return self._worker(role, argv, env)

    def mock(self, role: str, name: str, *flags: str, **engine_args: Any) -> Process:
        argv = ["--engine", "mock", "--model", name, "--lease-ttl-s", "1", *flags]
        return self._worker(role, [*argv, "--override-engine-args", json.dumps(engine_args)])

    def script(
        self, command: Sequence[str], argv: Sequence[str], env: Mapping[str, str] = {}
    ) -> Process:
        """Start another program."""
        self._processes.append(Process(command[-1], argv, {**self.env, **env}, command=command))
        return self._processes[-1]

    def trtllm(
        self, role: str, name: str, model: str, env: Mapping[str, str], **engine_args: Any
    ) -> Process:
        argv = ["--engine", "trtllm", "--model", model, "--served-model-name", name]
        return self._worker(role, [*argv, "--override-engine-args", json.dumps(engine_args)], env)

    def _worker(self, role: str, argv: Sequence[str], env: Mapping[str, str] = {}) -> Process:
        return self._start(
            "dynamo_trtllm", [*argv, "--disaggregation-mode", role, "--system-port", "0"], env
        )

    def workers(self) -> list[Process]:
        """Return the workers that run.

        A shared cluster also has some that another test has stopped.
        """
        return [process for process in self._processes[1:] if not process.is_over]

    @contextmanager
    def client(
        self, timeout_s: float = START_TIMEOUT_S, frontend: Process | None = None
    ) -> Iterator[httpx.Client]:
        """`frontend`: another one than the cluster's own."""
        url = (frontend or self.frontend).url()
        with httpx.Client(base_url=url, timeout=timeout_s, **PLAIN) as client:
            yield client

    def until_ready(self, *names: str) -> None:
        """Wait until all workers and these models are ready."""
        for process in self._processes[1:]:
            process.instance()
        for name in names:
            self.until_status(name, 200)

    def until_status(self, name: str, status: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the frontend reports this status for the model: 200 (ready) or 503 (not
        ready).
        """
        with self.client() as client:
            until(lambda: client.get(f"/v1/models/{name}/ready").status_code == status, timeout_s)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send(signal.SIGTERM)
        for process in reversed(self._processes):
            process.stop()


def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Wait for a condition. Return the seconds it took. Fail after a timeout."""
    begun = time.monotonic()
    pause_s = 0.01
    while not condition():
        waited = time.monotonic() - begun
        assert waited < timeout_s, f"condition not met within {timeout_s:g} s"
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.5)
    return time.monotonic() - begun


def gauges(worker: Process) -> dict[str, float]:
    """Return a worker's metrics without labels, by short name."""
    text = httpx.get(f"{worker.url()}/metrics", **PLAIN).text
    pairs = re.findall(r"^dynamo_trtllm_(\w+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in pairs}


def events(lines: Iterator[str]) -> Iterator[Any]:
    """Yield the JSON of server-sent events up to `[DONE]`. Fail without `[DONE]`."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            assert line.startswith("data: "), line
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def command(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float = START_TIMEOUT_S
) -> tuple[int, list[str]]:
    """Run a module. Return its exit status and the lines of stderr."""
    done = subprocess.run(
        [sys.executable, "-m", *argv],
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


# Runs modules one after another, as `python -m` does: each has its own log, and a text as exit
# status is printed. An import of a name that is None in sys.modules fails.
_IN_ONE = """
import contextlib, io, json, logging, runpy, sys
lines, without = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(without))
ended = []
for module, *sys.argv[1:] in lines:
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as exc:
            status = exc.code
            if isinstance(status, str):
                print(status, file=sys.stderr)
                status = 1
    logging.root.handlers.clear()
    ended.append((status or 0, out.getvalue(), err.getvalue()))
json.dump(ended, sys.stdout)
"""


class Ended(NamedTuple):
    status: int
    stdout: str
    stderr: str


def run_in_one(
    lines: Sequence[Sequence[str]],
    *,
    without: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run command lines that end before anything starts, each a module and its words, in one
    process.

    Args:
        lines: the modules and what follows them.
        without: packages that can't be imported.
        env: the environment of the process; its own, if None.
    """
    done = subprocess.run(
        [sys.executable, "-c", _IN_ONE, json.dumps([list(map(list, lines)), list(without)])],
        env=None if env is None else dict(env),
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Ended(*result) for result in json.loads(done.stdout)]


def write_yaml(folder: Path, text: str) -> str:
    path = folder / "engine.yaml"
    path.write_text(text)
    return str(path)
