"""Measure how long a frontend takes to answer /live and to serve its first model, and how much of
this time its imports take.

    python -m benchmarks.startup --repeat 3

Starts etcd, NATS, a frontend and then a mock worker with a Harmony model on free ports. Prints the
seconds since the start of the frontend, and since the registration of the worker.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dynamo_trtllm.launch.local_servers import start_etcd, start_nats
from dynamo_trtllm.support.subprocesses import scratch_folder, spawn

from .blocking import wait_for

MODEL = "mock"
STAGES = {
    "/live endpoint": "dynamo_trtllm.frontend.process.main",
    "whole frontend": "dynamo_trtllm.frontend.process.run_app",
}
_TIMEOUT_S = 60.0
_PAUSE_S = 0.002
_ROWS = 12  # packages that are listed, those with the longest imports
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \| +(\S+)")


class LoggedProcess:
    """A `python -m` process whose log lines are stored with their times."""

    def __init__(self, module: str, argv: list[str], env: Mapping[str, str]) -> None:
        self.begun = time.monotonic()
        self.process = spawn([sys.executable, "-m", module, *argv], env=env, stderr=subprocess.PIPE)
        self._lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append((time.monotonic(), line.decode(errors="replace")))

    def wait_for_line(self, pattern: str) -> tuple[float, re.Match[str]]:
        """Wait for a log line that matches.

        Return its time and the match. Exit with the log if the process ends.
        """
        matches: list[tuple[float, re.Match[str]]] = []

        def search() -> bool:
            for at_s, line in list(self._lines):
                match = re.search(pattern, line)
                if match is not None:
                    matches.append((at_s, match))
            return bool(matches) or self.process.poll() is not None

        wait_until(search)
        if not matches:
            raise SystemExit("".join(line for _, line in self._lines))
        return matches[0]

    def rss_mib(self) -> float:
        """Return the resident memory in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) / 1024

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def wait_until(condition: Callable[[], bool]) -> float:
    """Wait for a condition and return the time at which it held. Exit after a timeout."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"timeout after {_TIMEOUT_S:g} s")
        time.sleep(_PAUSE_S)
    return time.monotonic()


def http_request(port: int, method: str, path: str, body: object = None) -> tuple[int, str]:
    """Send a request. Return status and text of the response, or status 0 if no server listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


@contextmanager
def start_servers() -> Iterator[dict[str, str]]:
    """Start etcd and NATS for the context.

    Yield the environment for processes that connect to them.
    """
    with scratch_folder("dynamo-startup-") as folder:
        etcd = wait_for(start_etcd(folder / "etcd"))
        nats = wait_for(start_nats(folder / "nats"))
        env = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        try:
            yield env | {"ETCD_ENDPOINTS": etcd.address, "NATS_SERVER": nats.address}
        finally:
            wait_for(nats.stop())
            wait_for(etcd.stop())


def timeline(env: Mapping[str, str], port: int) -> dict[str, float]:
    """Start a frontend and a worker once. Return the measured seconds and MiB by name."""
    frontend = LoggedProcess("dynamo_trtllm.frontend", [f"--http-port={port}"], env)
    timings = {}
    try:
        live = wait_until(lambda: http_request(port, "GET", "/live")[0] == 200)
        timings["/live answers"] = live - frontend.begun
        loaded = wait_until(lambda: "loading" not in http_request(port, "GET", "/health")[1])
        timings["requests are taken"] = loaded - frontend.begun
        timings["MiB, no model"] = frontend.rss_mib()
        worker = LoggedProcess("dynamo_trtllm", ["--engine", "mock", "--model", MODEL], env)
        try:
            registered, _ = worker.wait_for_line("serving as instance")
            timings["worker: start to registration"] = registered - worker.begun
            seen, _ = frontend.wait_for_line("worker .* registered: model")
            timings["registration: seen"] = seen - registered
            served, _ = frontend.wait_for_line("model .* is ready")
            timings["registration: model served"] = served - registered
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 4,
            }
            answered = wait_until(
                lambda: http_request(port, "POST", "/v1/chat/completions", body)[0] == 200
            )
            timings["registration: first answer"] = answered - registered
            timings["MiB, one model"] = frontend.rss_mib()
        finally:
            worker.stop()
    finally:
        frontend.stop()
    return timings


def imports(module: str) -> Counter[str]:
    """Return the import time of each package in milliseconds.

    The time in which a package imports others counts for those.
    """
    command = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spent: Counter[str] = Counter()
    for us, name in _IMPORT.findall(text):
        spent[name.partition(".")[0]] += int(us)
    return Counter({name: us / 1000 for name, us in spent.items()})


def main() -> None:
    """Print medians of several starts, and the import times."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--repeat",
        type=int,
        default=3,
        metavar="N",
        help="number of starts of which medians are shown (default: 3)",
    )
    add(
        "--http-port",
        type=int,
        default=18080,
        metavar="PORT",
        help="port of the frontend (default: 18080)",
    )
    args = parser.parse_args()
    with start_servers() as env:
        runs = [timeline(env, args.http_port) for _ in range(args.repeat)]
    print(f"{'':32} median   lowest   highest, of {args.repeat}")
    for name in runs[0]:
        values = [run[name] for run in runs]
        print(f"{name:32} {statistics.median(values):7.3f}  {min(values):7.3f}  {max(values):7.3f}")
    for stage, module in STAGES.items():
        spent = imports(module)
        shown = ", ".join(f"{name} {ms:.0f}" for name, ms in spent.most_common(_ROWS))
        print(f"\nimports up to the {stage}: {sum(spent.values()):.0f} ms; {shown}")


if __name__ == "__main__":
    main()
