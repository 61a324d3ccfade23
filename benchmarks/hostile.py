"""Measures how much deliberately expensive requests slow down a frontend and its other clients.

    python -m benchmarks.hostile                  # all cases
    python -m benchmarks.hostile tool-words zeros

Starts a small deployment with the mock engine. For each case, another process sends its requests
from another address, while this one polls /live every 20 ms and runs a few normal streams. The exit
status is 1 if a limit is exceeded: /live takes more than 200 ms (99th percentile) or 500 ms
(worst), a normal stream has a gap of more than 500 ms between two tokens or waits for more than 2 s
for the first one, the frontend's memory grows by more than 20 bytes per byte sent, or most of it is
not freed after --settle-s.

  status            status codes of the requests
  seconds           until the last response
  first, gap        longest wait of a normal stream for its first token, and between two tokens, ms
  grown, per_byte   peak growth of the frontend's memory in MB, and per byte sent
  kept              growth that remains after --settle-s, MB
  errors            of the normal streams, by code
  load              average number of processes that wanted to run in the last minute: with more
                    than there are cores, latencies say little about the frontend
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import orjson

from .chaos.deployment import FRONTEND, Deployment, Options
from .chaos.load import build_load
from .hostile_requests import CASES, TIMEOUT_S, chat, exchange, letters, repeat_text, send
from .load_client import Client

_POLL_S = 0.02
_MARGIN_S = 0.5  # of normal load before and after the requests of a case
_STREAMS = 4
_OSL = 50
_LIMITS: Final = {
    "live_p99_ms": 200.0,
    "live_worst_ms": 500.0,
    "first_ms": 2000.0,
    "gap_ms": 500.0,
}
_PER_BYTE: Final = 20.0  # limit of the growth of memory, in bytes per byte sent
_NOISE_MB: Final = 48.0  # smaller growth is not counted: the allocator keeps some memory


class Frontend:
    """Measures the memory of the frontend's processes and the latency of /live."""

    def __init__(self, deployment: Deployment) -> None:
        self._pids = [process.pid for name, process in deployment.processes() if name == FRONTEND]
        self._port = deployment.http_port
        self.live_s: list[float] = []

    def reset_peak(self) -> None:
        """Reset the peak memory."""
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def megabytes(self, field: str) -> float:
        """Return VmRSS, or VmHWM for the peak since `reset_peak`, in MB."""
        total = 0
        for pid in self._pids:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith(field))
        return total / 1000

    async def poll(self) -> None:
        """Send GET /live at fixed intervals until cancelled.

        A slow response does not delay the next request.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._get_live())
                await asyncio.sleep(_POLL_S)

    async def _get_live(self) -> None:
        begun_s = time.perf_counter()
        await exchange(self._port, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        self.live_s.append(time.perf_counter() - begun_s)


def send_all(port: int, name: str) -> list[str]:
    """Send the requests of a case. Return their status codes, or the names of errors.

    Runs in a process of its own: thousands of requests would delay the other clients here.
    """

    async def send_together() -> list[str]:
        return await asyncio.gather(*(send(port, request) for request in CASES[name]()))

    return asyncio.run(send_together())


async def measure_case(deployment: Deployment, name: str, settle_s: float) -> dict[str, Any]:
    """Send the requests of one case. Return its row."""
    size = sum(request.num_sent for request in CASES[name]())
    loop = asyncio.get_running_loop()
    attacker = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    await loop.run_in_executor(attacker, os.getpid)  # starts the process
    frontend = Frontend(deployment)
    client = Client(build_load(deployment, osl=_OSL, streams=_STREAMS, timeout_s=TIMEOUT_S))
    before_mb = frontend.megabytes("VmRSS")
    frontend.reset_peak()
    polling = asyncio.create_task(frontend.poll())
    streaming = asyncio.create_task(client.run())
    try:
        await asyncio.sleep(_MARGIN_S)
        begun_s = time.perf_counter()
        statuses = await loop.run_in_executor(attacker, send_all, deployment.http_port, name)
        seconds = time.perf_counter() - begun_s
        await asyncio.sleep(_MARGIN_S)
        client.stop()
        records = await streaming
    finally:
        for task in (polling, streaming):
            task.cancel()
        await asyncio.gather(polling, streaming, return_exceptions=True)
        client.aclose()
        attacker.shutdown(wait=False, cancel_futures=True)
    grown_mb = frontend.megabytes("VmHWM") - before_mb
    await asyncio.sleep(settle_s)
    live_s = sorted(frontend.live_s)
    gaps_s = [max(r.gaps_s, default=0.0) for r in records]
    first_s = [(r.first_s or math.inf) - r.planned_s for r in records]
    return {
        "case": name,
        "status": _counted(statuses),
        "sent_mb": size / 1e6,
        "seconds": seconds,
        "live_p50_ms": 1000 * statistics.median(live_s),
        "live_p99_ms": 1000 * live_s[int(0.99 * (len(live_s) - 1))],
        "live_worst_ms": 1000 * live_s[-1],
        "first_ms": 1000 * max(first_s),
        "gap_ms": 1000 * max(gaps_s),
        "failed": sum(not record.is_ok for record in records),
        "errors": _counted(record.error for record in records if record.error),
        "load": os.getloadavg()[0],
        "grown_mb": grown_mb,
        "per_byte": grown_mb * 1e6 / size,
        "kept_mb": frontend.megabytes("VmRSS") - before_mb,
    }


def _counted(names: Iterable[str]) -> str:
    """Return the different names, each with how often it occurs."""
    return " ".join(f"{name}x{count}" for name, count in sorted(Counter(names).items()))


def missed(row: dict[str, Any]) -> Iterator[str]:
    """Yield the limits that a case exceeded."""
    yield from (name for name, limit in _LIMITS.items() if row[name] > limit)
    if row["failed"] or "silent" in row["status"]:
        yield "failed"
    if row["grown_mb"] > _NOISE_MB and row["per_byte"] > _PER_BYTE:
        yield "per_byte"
    if row["kept_mb"] > _NOISE_MB + row["sent_mb"]:
        yield "kept_mb"


async def _warm_up(deployment: Deployment) -> None:
    """Let the frontend take the memory that it takes only once, so that no case is charged with it.

    fastokens takes memory once in each thread that tokenizes and on the event loop. It takes more
    for varied text.
    """
    port = deployment.http_port
    await asyncio.gather(*(send(port, repeat_text("hello world, ")) for _ in range(8)))
    await asyncio.gather(*(send(port, letters(seed)) for seed in range(32)))
    await asyncio.gather(*(send(port, chat()) for _ in range(8)))
    client = Client(build_load(deployment, osl=_OSL, streams=_STREAMS, timeout_s=TIMEOUT_S))
    streaming = asyncio.create_task(client.run())
    await asyncio.sleep(_MARGIN_S)
    client.stop()
    await streaming
    client.aclose()


async def _run(names: Sequence[str], settle_s: float, *, as_json: bool) -> bool:
    deployment = Deployment(Options())
    is_good = True
    try:
        deployment.start()
        await _warm_up(deployment)
        for name in names:
            row = await measure_case(deployment, name, settle_s)
            row["missed"] = list(missed(row))
            is_good = is_good and not row["missed"]
            if as_json:
                sys.stdout.write(orjson.dumps(row).decode() + "\n")
            else:
                cells = [
                    f"{key} {v:.1f}" if isinstance(v, float) else f"{key} {v}"
                    for key, v in row.items()
                    if v
                ]
                sys.stdout.write("  ".join(cells) + "\n")
            sys.stdout.flush()
    finally:
        deployment.stop()
    return is_good


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "case", nargs="*", choices=[*CASES, []], metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument(
        "--settle-s",
        type=float,
        default=10.0,
        help="seconds to wait before the last memory reading (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line per case")
    args = parser.parse_args()
    raise SystemExit(
        0 if asyncio.run(_run(args.case or list(CASES), args.settle_s, as_json=args.json)) else 1
    )


if __name__ == "__main__":
    main()
