"""Measures what the flight recorder costs: an event, the progress of a stream, and a request in the frontend.

Needs no server and no model. The CPU time of a request is measured with and without a recording, in turns.

python -m benchmarks.recorder [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from dynamo_trtllm.observability.recorder import RECORDER, RecordedEvent
from dynamo_trtllm.observability.recordings import Recordings

from .frontend_step import make_exchange

_EVENTS = 50_000
_STREAMS = 1_000
_REQUESTS = 100  # per round
_TOKENS = 250
_ID = "0123456789abcdef-0123456789abcdef"


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
    """Print the medians."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.recorder",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of which medians are shown (default: 15)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="recorder-") as folder:
        asyncio.run(_measure(Path(folder), rounds))


async def _measure(folder: Path, rounds: int) -> None:
    exchange = make_exchange("content", _TOKENS)
    await exchange()
    off_us, on_us = [], []
    for _ in range(rounds):
        off_us.append(await _request_us(exchange))
        RECORDER.start(folder, namespace="benchmark", kind="frontend")
        on_us.append(await _request_us(exchange))
        RECORDER.stop()
    recordings = await asyncio.to_thread(Recordings.read, folder)
    per_request = statistics.mean(len(request.steps) for request in recordings.requests.values())
    off, on = statistics.median(off_us), statistics.median(on_us)
    extra = statistics.median(with_it - without for with_it, without in zip(on_us, off_us, strict=True))
    RECORDER.start(folder, namespace="benchmark", kind="frontend")
    event_ns = statistics.median(_event_ns() for _ in range(rounds))
    tick_us = _tick_us(rounds)
    RECORDER.stop()
    print(f"one event                                     {event_ns:8.0f} ns of CPU")
    print(f"progress of {_STREAMS} streams, once a second      {tick_us:8.0f} us of CPU")
    print(f"events of a request in the frontend, without those of the pipeline: {per_request:.1f}")
    print(f"request of {_TOKENS} tokens, without a recording  {off:8.0f} us of CPU, {off / _TOKENS:.2f} us per token")
    print(f"request of {_TOKENS} tokens, with a recording     {on:8.0f} us of CPU, {on / _TOKENS:.2f} us per token")
    print(f"median difference                             {extra:8.0f} us of CPU, {extra / off:.1%}")


async def _request_us(exchange: Callable[[], Coroutine[Any, Any, None]]) -> float:
    begun_s = time.process_time()
    for _ in range(_REQUESTS):
        await exchange()
    return (time.process_time() - begun_s) / _REQUESTS * 1e6


def _event_ns() -> float:
    record, event = RECORDER.record, RecordedEvent.PROGRESS
    begun_s = time.process_time()
    for number in range(_EVENTS):
        record(_ID, event, number)
    return (time.process_time() - begun_s) / _EVENTS * 1e9


def _tick_us(rounds: int) -> float:
    """Return the CPU time that all streams take together, of which a tick visits a part."""
    for _ in range(_STREAMS):
        RECORDER.follow(CountingStream())
    begun_s = time.process_time()
    for _ in range(rounds):
        RECORDER.record_progress(_STREAMS)
    return (time.process_time() - begun_s) / rounds * 1e6


if __name__ == "__main__":
    main()
