"""Measures how long an engine thread waits for the GIL while the event loop of its worker streams tokens.

    python -m benchmarks.step_jitter --streams 1024

Runs a worker with the mock engine in this process, with real NATS, a frontend and a load client. Another thread
imitates the steps of an engine: Python work of a fixed size, then a wait without the GIL. The wait for the GIL is the
duration of a step minus its CPU time, its wait, and the time it waited for a CPU core. Shown without streams and with
all streams, for Python's default switch interval and a shorter one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.worker import Worker

from .startup import MODEL, LoggedProcess, http_request, start_servers

_WAIT_S = 0.004
_WORK_S = 0.001
_STEP_S = 0.04  # of the mock engine
_INTERVALS_S = (0.005, 0.0005)
_PORT = 18081
_IDLE_S = 3.0
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """Duration of one step."""

    total_s: float
    gil_s: float  # part of it that was spent waiting for the GIL


class EngineThread:
    """A thread that runs steps without end."""

    def __init__(self) -> None:
        self._turns = self._calibrate()
        self._steps: list[Step] = []
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def take(self) -> list[Step]:
        """Return the steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def _calibrate(self) -> int:
        """Return the loop count that takes _WORK_S."""
        turns, begun = 100_000, time.thread_time()
        _work(turns)
        return round(turns * _WORK_S / (time.thread_time() - begun))

    def _run(self) -> None:
        delay = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while True:
            core_wait_s, cpu_s, begun = _core_wait_s(delay), time.thread_time(), time.perf_counter()
            _work(self._turns)
            time.sleep(_WAIT_S)
            total_s = time.perf_counter() - begun
            own_s = time.thread_time() - cpu_s + _core_wait_s(delay) - core_wait_s + _WAIT_S
            self._steps.append(Step(total_s, max(0.0, total_s - own_s)))


def _work(turns: int) -> None:
    for _ in range(turns):
        pass


def _core_wait_s(schedstat: Path) -> float:
    """Return the seconds for which the thread waited for a CPU core."""
    return int(schedstat.read_text().split()[1]) / 1e9


def row(name: str, steps: list[Step]) -> str:
    """Return a line with GIL waits and step durations in milliseconds."""
    gil, total = (sorted(1e3 * getattr(step, field) for step in steps) for field in ("gil_s", "total_s"))
    figures = [statistics.mean(gil), *(_percentile(gil, each) for each in (50, 90, 99)), gil[-1]]
    figures += [_percentile(total, each) for each in (50, 99)]
    return f"{name:32} {len(steps):6} " + " ".join(f"{figure:8.3f}" for figure in figures)


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[(len(ordered) - 1) * percent // 100]


async def steps_under_load(env: dict[str, str], streams: int, engine: EngineThread) -> list[Step]:
    """Run the load client and return the steps during which all streams ran."""
    words = ["--url", f"http://127.0.0.1:{_PORT}", "--concurrency", str(streams), "--requests", str(streams)]
    command = [sys.executable, "-m", f"{__package__}.client", *words, "--isl", "64", "--osl", "256", "--json"]
    client = await asyncio.create_subprocess_exec(*command, env=env, stdout=subprocess.DEVNULL)
    steps: list[Step] = []
    while client.returncode is None:
        engine.take()
        before = await running_streams()
        await asyncio.sleep(0.5)
        part = engine.take()
        if min(before, await running_streams()) > 0.9 * streams:
            steps += part
    return steps


async def running_streams() -> float:
    """Return the number of running streams from the frontend's metrics."""
    _, text = await asyncio.to_thread(http_request, _PORT, "GET", "/metrics")
    return float(text.partition("\ndynamo_trtllm_choices ")[2].partition("\n")[0] or 0)


async def measure(env: dict[str, str], streams: int) -> None:
    """Print a row for each switch interval, without and with streams."""
    config = WorkerConfig(
        model_path=MODEL,
        engine="mock",
        override_engine_args={"step_s": _STEP_S},
        etcd_endpoints=env["ETCD_ENDPOINTS"],
        nats_server=env["NATS_SERVER"],
    )
    worker = Worker(config)
    serving = asyncio.create_task(worker.serve())
    frontend = LoggedProcess("dynamo_trtllm.frontend", [f"--http-port={_PORT}"], env)
    engine = EngineThread()
    try:
        async with asyncio.timeout(_READY_S):
            await asyncio.to_thread(frontend.wait_for_line, "model .* is ready")
        columns = ("GIL avg", "p50", "p90", "p99", "max", "step p50", "p99")
        print(f"{'ms':32} {'steps':>6} " + " ".join(f"{column:>8}" for column in columns))
        for interval_s in _INTERVALS_S:
            sys.setswitchinterval(interval_s)
            name = f"switch interval {1e3 * interval_s:g} ms"
            engine.take()
            await asyncio.sleep(_IDLE_S)
            print(row(f"{name}, no stream", engine.take()))
            steps = await steps_under_load(env, streams, engine)
            print(row(f"{name}, {streams}", steps) if steps else f"{name}: not all streams ran at the same time")
    finally:
        worker.stop()
        await serving
        frontend.stop()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.step_jitter",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=1024, help="concurrent streams (default: 1024)")
    args = parser.parse_args()
    with start_servers() as env:
        uvloop.run(measure(dict(env) | {"PATH": os.environ.get("PATH", "")}, args.streams))


if __name__ == "__main__":
    main()
