"""Measure what phases and the flight recorder cost: CPU time per token of a deployment, per event,
and per second of running streams.

Runs one deployment of mock workers, whose processes switch both off and on again at a signal, and
sends it waves of requests with and without them in turn, so that nothing else differs. A pair is
four waves: with, without, without, with. Prints the median of the pairs with its 95% interval, by
bootstrap, and whether it is at most the bar of 3%. Spans, which are readings of a clock, are taken
in both kinds of waves. Other load on the machine widens the interval.

    python -m benchmarks.recorder [--pairs N] [--point NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.support.network.addresses import free_ports

from .load_client import WORDS
from .plane.ours import Ours
from .plane.points import Engines, Point, select
from .plane.stack import MODEL, Stack
from .summary import ProcessMeter, interval

BAR = 0.03
MEMORY = "/dev/shm"  # the flight recorder writes into memory only
_EVENTS = 50_000
_STREAMS = 1_000
_ROUNDS = 15
_ID = "0123456789abcdef-0123456789abcdef"
# As the first argument: run this process, which has the switch.
_SWITCHES = ("frontend", "worker")
_OFF = signal.SIGUSR1
_ON = signal.SIGUSR2
_SWITCHED_S = 0.05  # the wait until all processes have switched
_MAX_RESPONSE_BYTES = 1 << 20
_WARM_UP_WAVES = 4  # they fill caches, and are not counted
_MEASURES = {"all processes": ("frontend", "prefill", "decode"), "frontend": ("frontend",)}


Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Switched(Ours):
    """This project with a switch in its processes."""

    def frontend(self, port: int, pace_s: float) -> Sequence[str]:
        _, _, *flags = super().frontend(port, pace_s)
        return ("-m", f"{__package__}.recorder", "frontend", *flags)

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        _, _, *flags = super().worker(role, pace_s)
        return ("-m", f"{__package__}.recorder", "worker", *flags)


class CountingStream:
    """A stream that has a new token at each look."""

    request_id = _ID

    def __init__(self) -> None:
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        self._num_tokens += 1
        return self._num_tokens


def main() -> None:
    """Print what an event costs, and both together.

    The exit status is 1 if they cost more than the bar.
    """
    if sys.argv[1:2] and sys.argv[1] in _SWITCHES:
        _run_switched(sys.argv.pop(1))
        return
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.recorder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--pairs", type=int, default=30, help="pairs (default: 30, about 4 minutes)"
    )
    parser.add_argument(
        "--point", default="paced-128", help="load, of benchmarks.plane (default: paced-128)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recorder-", dir=MEMORY) as folder:
        asyncio.run(_print_parts(Path(folder)))
    [point] = select([args.point], quick=False)
    with Stack(Switched(), free_ports(), Engines(point.pace_s, point.pairs)) as stack:
        extra = asyncio.run(_measure_pairs(stack, point, args.pairs))
    for name, shares in extra.items():
        low, high = interval(shares, statistics.median)
        print(
            f"CPU time per token, {name:14} {statistics.median(shares):+7.1%}, between {low:+.1%}"
            f" and {high:+.1%}"
        )
    cost = statistics.median(extra["all processes"])
    print(f"bar: at most {BAR:.0%} of all processes: {'held' if cost <= BAR else 'missed'}")
    raise SystemExit(0 if cost <= BAR else 1)


def _run_switched(process: str) -> None:
    """Run a frontend or worker that records nothing and divides no request into phases between two
    signals.
    """
    from dynamo_trtllm.frontend.process.main import main as run_frontend
    from dynamo_trtllm.frontend.requests import timeline
    from dynamo_trtllm.protocol import phases

    from .plane import runner_worker

    divide = phases.divide
    rings = list[object]()

    def switch_off(*_: object) -> None:
        rings.append(RECORDER._ring)
        RECORDER._ring = None
        timeline.divide = lambda *_: {}  # type: ignore[attr-defined]  # for measurements, so no flag does it

    def switch_on(*_: object) -> None:
        RECORDER._ring = rings.pop()  # type: ignore[assignment]
        timeline.divide = divide  # type: ignore[attr-defined]
        if RECORDER._timer is not None:
            RECORDER._timer.cancel()
        RECORDER._tick()

    signal.signal(_OFF, switch_off)
    signal.signal(_ON, switch_on)
    run = run_frontend if process == "frontend" else runner_worker.run
    run()


async def _measure_pairs(stack: Stack, point: Point, count: int) -> dict[str, list[float]]:
    """Return by measure how much more CPU time each pair took with phases and recordings, as a
    share.
    """
    extra: dict[str, list[float]] = {measure: [] for measure in _MEASURES}
    host, port = stack.url.removeprefix("http://").split(":")
    streams = await asyncio.gather(
        *(
            asyncio.open_connection(host, int(port), limit=_MAX_RESPONSE_BYTES)
            for _ in range(point.streams)
        )
    )
    for _ in range(_WARM_UP_WAVES):
        await _wave(stack, streams, point)
    for number in range(count):
        with_it = [await _wave(stack, streams, point)]
        _switch(stack, _OFF)
        without = [await _wave(stack, streams, point) for _ in range(2)]
        _switch(stack, _ON)
        with_it.append(await _wave(stack, streams, point))
        for measure, names in _MEASURES.items():
            with_s, without_s = (
                sum(cpu_s[name] for cpu_s in waves for name in names)
                for waves in (with_it, without)
            )
            extra[measure].append(with_s / without_s - 1)
        sys.stderr.write(f"pair {number + 1}: {extra['all processes'][-1]:+.1%}\n")
    for _, writer in streams:
        writer.close()
    return extra


async def _wave(stack: Stack, streams: Sequence[Connection], point: Point) -> dict[str, float]:
    """Send a request on each connection, all at once.

    Return the CPU seconds of each process until all have ended.
    """
    meter = ProcessMeter(stack.pids)
    meter.start()
    await asyncio.gather(*(_chat(*connection, point) for connection in streams))
    costs = meter.costs(wall_s=1.0, tokens=0, requests=1)
    return {name: cost["cpu_s"] for name, cost in costs.items()}


async def _chat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, point: Point) -> None:
    text = " ".join(random.choices(WORDS, k=point.isl))
    messages = [{"role": "user", "content": text}]
    body = json.dumps(
        {"model": MODEL, "messages": messages, "max_tokens": point.osl, "stream": True}
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write((head + body).encode())
    await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def _switch(stack: Stack, number: signal.Signals) -> None:
    for name, pid in stack.pids.items():
        if name not in ("etcd", "nats"):
            os.kill(pid, number)
    time.sleep(_SWITCHED_S)


async def _print_parts(folder: Path) -> None:
    """Print the cost of an event and of a tick. It runs on the event loop, as in a process."""
    RECORDER.start(folder, namespace="benchmark", kind="frontend")
    event_ns = statistics.median(_event_ns() for _ in range(_ROUNDS))
    tick_us = _tick_us()
    RECORDER.stop()
    print(f"one event                                {event_ns:8.0f} ns of CPU")
    print(f"progress of {_STREAMS} streams, once a second {tick_us:8.0f} us of CPU")


def _event_ns() -> float:
    record = RECORDER.record
    event = RecordedEvent.PROGRESS
    begun_s = time.process_time()
    for number in range(_EVENTS):
        record(_ID, event, number)
    return (time.process_time() - begun_s) / _EVENTS * 1e9


def _tick_us() -> float:
    """Return the CPU time that all streams take together. A tick visits a part of them."""
    for _ in range(_STREAMS):
        RECORDER.follow(CountingStream())
    begun_s = time.process_time()
    for _ in range(_ROUNDS):
        RECORDER.record_progress(_STREAMS)
    return (time.process_time() - begun_s) / _ROUNDS * 1e6


if __name__ == "__main__":
    main()
