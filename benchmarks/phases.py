"""Compare the phases of requests with the time that their client sees, while workers are killed.

    python -m benchmarks.phases --requests 500

Starts a deployment with two prefill and two decode workers of the mock engine, whose steps take a
known time, sends streaming chats over keep-alive connections and kills a worker from time to time.
For each request, the sum of the phases may differ from the client's time by 1 ms or 2%, whichever
is larger. The difference contains the time for which client and frontend wait for a CPU core, so it
needs a machine with free cores: the round trip of `GET /live` before each request shows that time.
Writes the result as JSON to benchmarks/results/. The exit status is 1 if a request was outside the
bound or failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import msgspec

from .chaos.deployment import STEP_S, WORKERS, Deployment, Options
from .deployment import FRONTEND

# How much phases and the client's time may differ: the larger one of these.
BOUND_S = 0.001
BOUND_SHARE = 0.02  # of the client's time
_OSL = 32
_PROMPT_WORDS = (10, 1500)  # the least and the most
_TIMEOUT_S = 60.0
_RESULTS = Path(__file__).parent / "results"


class TimedRequest(msgspec.Struct, frozen=True):
    """One request: the client's times and the phases that the frontend reports, in seconds."""

    live_s: float  # the round trip before it
    client_s: float
    client_ttft_s: float
    ttft_s: float
    phase_s: dict[str, float]
    ttft_phase_s: dict[str, float]  # the part of the phases before the first token

    @property
    def difference_s(self) -> float:
        return self.client_s - sum(self.phase_s.values())

    @property
    def is_within(self) -> bool:
        return abs(self.difference_s) <= max(BOUND_S, BOUND_SHARE * self.client_s)

    @property
    def named_ttft_share(self) -> float:
        """The share of the client's time to first token that lies in phases."""
        return sum(self.ttft_phase_s.values()) / self.client_ttft_s


async def send(
    port: int, model: str, requests: Iterator[int], results: list[TimedRequest], failed: list[str]
) -> None:
    """Send requests one after the other over one connection, until the iterator ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in requests:
        words = random.Random(number).randint(*_PROMPT_WORDS)
        message = {"role": "user", "content": f"{number} " + "word " * words}
        body = json.dumps(
            {"model": model, "stream": True, "max_tokens": _OSL, "messages": [message]}
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"x-dynamo-stats: 1\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        begun_s = time.perf_counter()
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.read(1 << 16)
        live_s = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        first_s = 0.0
        received = b""
        writer.write(head.encode() + body)
        async with asyncio.timeout(_TIMEOUT_S):
            while not received.endswith((b"data: [DONE]\n\n\r\n0\r\n\r\n", b'"error"')):
                part = await reader.read(1 << 16)
                now_s = time.perf_counter()
                received += part
                # The first event has the first token.
                if not first_s and b"data: " in received:
                    first_s = now_s
                if not part or (b'"error":{' in part and b"[DONE]" not in part):
                    break
        stats = re.findall(rb'"dynamo_trtllm":(\{.*\})\}', received)
        if not stats:
            failed.append(received[-300:].decode(errors="replace"))
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            continue
        found = json.loads(stats[-1])
        results.append(
            TimedRequest(
                live_s,
                now_s - begun_s,
                first_s - begun_s,
                found["ttft_s"],
                found["phase_s"],
                found["ttft_phase_s"],
            )
        )
    writer.close()


async def kill_workers(deployment: Deployment, every_s: float, killed: list[str]) -> None:
    """Kill one worker after the other. The launcher starts it again."""
    while True:
        await asyncio.sleep(every_s)
        # From the last worker to the first: decode workers come first, whose streams migrate.
        name = WORKERS[(3 - len(killed)) % len(WORKERS)]
        await asyncio.to_thread(deployment.wait_ready, _TIMEOUT_S)
        deployment.send(name, signal.SIGKILL)
        killed.append(name)


async def measure(deployment: Deployment, options: argparse.Namespace) -> dict[str, Any]:
    """Run the load. Return the summary of its requests."""
    port = deployment.http_port
    model = deployment.model
    warm: list[TimedRequest] = []
    await send(port, model, iter(range(20)), warm, [])
    requests = iter(range(options.requests))
    results = list[TimedRequest]()
    killed = list[str]()
    failed = list[str]()
    killing = asyncio.create_task(kill_workers(deployment, options.kill_every_s, killed))
    try:
        await asyncio.gather(
            *(send(port, model, requests, results, failed) for _ in range(options.concurrency))
        )
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    return summary(results, killed, failed)


def summary(
    results: Sequence[TimedRequest], killed: Sequence[str], failed: Sequence[str]
) -> dict[str, Any]:
    """Return the differences, how many requests are outside the bound, and the mean of each
    phase.
    """
    names = sorted({name for result in results for name in result.phase_s})
    per_request = {name: [result.phase_s.get(name, 0.0) for result in results] for name in names}
    times_ms = (
        [result.difference_s * 1e3 for result in results],
        [result.live_s * 1e3 for result in results],
    )
    difference_ms, live_ms = (
        {f"p{at / 10:g}": cuts[at - 1] for at in (500, 990, 999)} for cuts in map(_cuts, times_ms)
    )
    # Requests that no killed worker has disturbed.
    undisturbed = [
        result for result in results if not {"retry", "migration"} & result.phase_s.keys()
    ]
    return {
        "requests": len(results),
        "failed": list(failed),
        "outside": [msgspec.to_builtins(result) for result in results if not result.is_within][:20],
        "num_outside": sum(not result.is_within for result in results),
        "retried": sum("retry" in result.phase_s for result in results),
        "migrated": sum("migration" in result.phase_s for result in results),
        "killed": list(killed),
        "difference_ms": difference_ms,
        "live_ms": live_ms,
        "named_ttft_share": {
            "mean": fmean(result.named_ttft_share for result in results),
            "p1": quantiles([result.named_ttft_share for result in results], n=100)[0],
        },
        "decode_ms": (
            fmean(
                result.phase_s["decode"] + result.phase_s["decode_wait"] for result in undisturbed
            )
            * 1e3
        ),
        "known_decode_ms": (_OSL - 1) * STEP_S * 1e3,
        "mean_phase_ms": {
            name: round(fmean(values) * 1e3, 4) for name, values in per_request.items()
        },
    }


def _cuts(times_ms: Sequence[float]) -> list[float]:
    return quantiles(times_ms, n=1000)


def main() -> int:
    """Run it and write the result."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.phases",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument(
        "--concurrency", type=int, default=32, help="connections, each with one request at a time"
    )
    parser.add_argument(
        "--kill-every-s", type=float, default=15.0, help="seconds between two killed workers"
    )
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="let no other process delay client and frontend (root)",
    )
    options = parser.parse_args()
    deployment = Deployment(Options(engine="mock"))
    try:
        deployment.start()
        if options.realtime:
            for pid in (os.getpid(), deployment.process(FRONTEND).pid):
                os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(1))
        found = asyncio.run(measure(deployment, options))
    finally:
        deployment.stop()
    result = {
        "what": "phases",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **vars(options),
        **found,
    }
    path = _RESULTS / f"phases-{re.sub('[^0-9]', '', result['at'])[:14]}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{found['requests']} requests, {found['retried']} retried, {found['migrated']} migrated")
    print(f"{found['num_outside']} outside 1 ms or 2%, {len(found['failed'])} failed")
    for what, name in (("client - phases", "difference_ms"), ("GET /live", "live_ms")):
        print(
            f"{what}, ms: "
            + ", ".join(f"{percentile} {ms:.2f}" for percentile, ms in found[name].items())
        )
    print(f"share of TTFT in phases: mean {found['named_ttft_share']['mean']:.4f}")
    print(
        f"decode, ms: {found['decode_ms']:.1f}; known: {found['known_decode_ms']:.1f}; written:"
        f" {path}"
    )
    return 1 if found["num_outside"] or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
