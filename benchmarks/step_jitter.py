"""How much the plane of a worker takes from an engine thread beside it: the GIL, for which both compete.

    python -m benchmarks.step_jitter --streams 1024

A worker with the mock engine serves in this process, over real NATS, for a real frontend and load client. Beside its
loop runs a thread that does what an engine thread does in each step: Python work of a fixed size, then a wait without
the GIL. What a step takes beyond its own CPU time, its wait, and the time in which the system gave it no core, it has
waited for the GIL. Shown with no stream and with all of them, with Python's own switch interval and with a shorter one.
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

from benchmarks.startup import MODEL, Watched, ask, servers
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.worker import Worker

_WAIT_S = 0.004
_WORK_S = 0.001
_STEP_S = 0.04  # of the mock engine
_INTERVALS_S = (0.005, 0.0005)
_PORT = 18081
_CALM_S = 3.0
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    whole_s: float
    gil_s: float  # of it: waited for the GIL


class EngineThread:
    """Steps without end. `take` gives those since it was called last."""

    def __init__(self) -> None:
        self._turns = self._calibrated()
        self._steps: list[Step] = []
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def take(self) -> list[Step]:
        steps, self._steps = self._steps, []
        return steps

    def _calibrated(self) -> int:
        turns, begun = 100_000, time.thread_time()
        _work(turns)
        return round(turns * _WORK_S / (time.thread_time() - begun))

    def _run(self) -> None:
        delay = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        while True:
            held_s, cpu_s, begun = _held_s(delay), time.thread_time(), time.perf_counter()
            _work(self._turns)
            time.sleep(_WAIT_S)
            whole_s = time.perf_counter() - begun
            own_s = time.thread_time() - cpu_s + _held_s(delay) - held_s + _WAIT_S
            self._steps.append(Step(whole_s, max(0.0, whole_s - own_s)))


def _work(turns: int) -> None:
    for _ in range(turns):
        pass


def _held_s(schedstat: Path) -> float:
    """For which the system let the thread wait for a core."""
    return int(schedstat.read_text().split()[1]) / 1e9


def row(name: str, steps: list[Step]) -> str:
    gil, whole = (sorted(1e3 * getattr(step, field) for step in steps) for field in ("gil_s", "whole_s"))
    figures = [statistics.mean(gil), *(_at(gil, each) for each in (50, 90, 99)), gil[-1]]
    figures += [_at(whole, each) for each in (50, 99)]
    return f"{name:32} {len(steps):6} " + " ".join(f"{figure:8.3f}" for figure in figures)


def _at(ordered: list[float], percent: int) -> float:
    return ordered[(len(ordered) - 1) * percent // 100]


async def loaded(env: dict[str, str], streams: int, engine: EngineThread) -> list[Step]:
    """The steps while all streams run."""
    words = ["--url", f"http://127.0.0.1:{_PORT}", "--concurrency", str(streams), "--requests", str(streams)]
    command = [sys.executable, "-m", "benchmarks.client", *words, "--isl", "64", "--osl", "256", "--json"]
    client = await asyncio.create_subprocess_exec(*command, env=env, stdout=subprocess.DEVNULL)
    steps: list[Step] = []
    while client.returncode is None:
        engine.take()
        before = await running()
        await asyncio.sleep(0.5)
        part = engine.take()
        if min(before, await running()) > 0.9 * streams:
            steps += part
    return steps


async def running() -> float:
    """Streams, as the frontend tells."""
    _, text = await asyncio.to_thread(ask, _PORT, "GET", "/metrics")
    return float(text.partition("\ndynamo_trtllm_choices ")[2].partition("\n")[0] or 0)


async def measure(env: dict[str, str], streams: int) -> None:
    config = WorkerConfig(
        model_path=MODEL,
        engine="mock",
        override_engine_args={"step_s": _STEP_S},
        etcd_endpoints=env["ETCD_ENDPOINTS"],
        nats_server=env["NATS_SERVER"],
    )
    worker = Worker(config)
    serving = asyncio.create_task(worker.serve())
    frontend = Watched("dynamo_trtllm.frontend", [f"--http-port={_PORT}"], env)
    engine = EngineThread()
    try:
        async with asyncio.timeout(_READY_S):
            await asyncio.to_thread(frontend.said, "model .* is ready")
        columns = ("GIL avg", "p50", "p90", "p99", "max", "step p50", "p99")
        print(f"{'ms':32} {'steps':>6} " + " ".join(f"{column:>8}" for column in columns))
        for interval_s in _INTERVALS_S:
            sys.setswitchinterval(interval_s)
            name = f"switch interval {1e3 * interval_s:g} ms"
            engine.take()
            await asyncio.sleep(_CALM_S)
            print(row(f"{name}, no stream", engine.take()))
            steps = await loaded(env, streams, engine)
            print(row(f"{name}, {streams}", steps) if steps else f"{name}: the streams never all ran at one time")
    finally:
        worker.stop()
        await serving
        frontend.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1024)
    args = parser.parse_args()
    with servers() as env:
        uvloop.run(measure(dict(env) | {"PATH": os.environ.get("PATH", "")}, args.streams))


if __name__ == "__main__":
    main()
