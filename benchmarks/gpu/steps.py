"""The steps of a run on deployments that serve: cancellations, shapes, a killed worker. Each gives its rows.

A step measures and compares; it starts and stops nothing but load.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import tokens
from benchmarks.gpu.deployed import Deployed
from benchmarks.gpu.result import Row
from benchmarks.gpu.scraped import phase_split
from benchmarks.launched import NotServing
from benchmarks.stream import Record

Found = tuple[list[Row], dict[str, Any]]
Shapes = dict[str, dict[str, Any]]  # figures by `ISL/OSL at CONCURRENCY`
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is asked. The defaults are those of the bars."""

    parity_prompts: int = 64
    shortest: int = 100
    longest: int = 16_000
    parity_osl: int = 32
    parity_concurrency: int = 32
    shapes: tuple[tuple[int, int, int], ...] = ((8192, 1024, 32), (1000, 2000, 64), (128, 1000, 64), (32000, 256, 8))
    waves: int = 2  # requests of a shape, in units of its concurrency
    shape_s: float = 45.0  # no new request of a shape after this
    cancel_requests: int = 200
    cancel_isl: int = 4000
    kill_s: float = 240.0  # longest wait for the successor
    overhead_isl: int = 8192
    overhead_osl: int = 256
    overhead_concurrency: int = 64
    overhead_requests: int = 128
    overhead_rounds: int = 3
    alone_requests: int = 24
    seed: int = 7


# --- shapes --------------------------------------------------------------------------------------------


async def shape(url: str, sizes: Sizes, isl: int, osl: int, concurrency: int) -> dict[str, Any]:
    """Figures of one load and where its requests spent their time."""
    given = tokens.prompts(concurrency * sizes.waves, isl, seed=sizes.seed + isl + osl)
    before = await asyncio.to_thread(phase_split, url)
    found, _ = await tokens.measure(
        url, given, osl=osl, concurrency=concurrency, extra=tokens.SAMPLED, seconds=sizes.shape_s
    )
    after = await asyncio.to_thread(phase_split, url)
    split = {name: _mean(total, before.get(name, (0.0, 0.0))) for name, total in after.items()}
    return dict(found) | {"phase_ms": split}


def _mean(after: tuple[float, float], before: tuple[float, float]) -> float:
    """Milliseconds per request, of (seconds, count) that only grow."""
    count = after[1] - before[1]
    return round((after[0] - before[0]) / count * 1e3, 2) if count else 0.0


async def shapes(url: str, sizes: Sizes) -> Shapes:
    """All of them, one after the other."""
    return {
        f"{isl}/{osl} at {concurrency}": await shape(url, sizes, isl, osl, concurrency)
        for isl, osl, concurrency in sizes.shapes
    }


def shape_rows(arm: str, found: Mapping[str, dict[str, Any]], gpus: int) -> list[Row]:
    """One row for each shape: output tokens per second and GPU, first token, gaps; and where the time went."""
    rows = []
    for name, one in found.items():
        rows.append(Row(what=f"{name}, {arm}", value=_spoken(one, max(1, gpus))))
        if split := one["phase_ms"]:
            listed = ", ".join(f"{phase} {ms:.1f}" for phase, ms in split.items())
            rows.append(Row(what=f"{name}, {arm}: mean ms per request", value=listed))
    return rows


def _spoken(found: dict[str, Any], gpus: int) -> str:
    first, gaps = found["ttft_ms"], found["itl_ms"]
    if not first or not gaps:
        return f"no answer: {found['errors']}"
    errors = f", errors {found['errors']}" if found["errors"] else ""
    return (
        f"{found['tokens_per_s'] / gpus:.0f} tokens/s/GPU, TTFT p50 {first['p50']:.0f} p99 {first['p99']:.0f} ms, "
        f"ITL p50 {gaps['p50']:.1f} p99 {gaps['p99']:.1f} ms{errors}"
    )


# --- cancellation --------------------------------------------------------------------------------------


async def cancels(deployed: Deployed, sizes: Sizes) -> Found:
    """Three of ten clients leave at random moments; then nothing may be held anywhere."""
    source = random.Random(sizes.seed)
    leaving = sizes.cancel_requests * 3 // 10
    staying = sizes.cancel_requests - leaving
    given = tokens.prompts(sizes.cancel_requests, sizes.cancel_isl, seed=sizes.seed + 1)
    asked: dict[str, Any] = {"osl": 64, "extra": tokens.SAMPLED}

    async def leave(prompt: tokens.Prompt) -> list[Record]:
        await asyncio.sleep(source.uniform(0.0, 4.0))
        wait_s = source.choice((0.005, 0.02, 0.1, 0.3, 1.0)) * source.uniform(0.5, 1.5)
        return await tokens.send(deployed.url, [prompt], concurrency=1, timeout_s=wait_s, **asked)

    stayed, *left = await asyncio.gather(
        tokens.send(deployed.url, given[:staying], concurrency=24, **asked),
        *(leave(prompt) for prompt in given[staying:]),
    )
    errors = Counter(record.error for record in stayed if not record.is_ok)
    gone = sum(record.error == "timeout" for records in left for record in records)
    idle_s, held = await _idle(deployed)
    rows = [
        Row(
            what=f"{sizes.cancel_requests} requests, {gone} left at random moments: still held after",
            value="nothing" if not held else "; ".join(held),
            bar="nothing",
            met=not held,
        ),
        Row(what="until all KV blocks were free", value=f"{idle_s:.2f} s"),
        Row(what="errors of those who stayed", value=_counted(errors), bar="none", met=not errors),
    ]
    return rows, {"left": gone, "held": held, "idle_s": idle_s, "errors": dict(errors)}


async def _idle(deployed: Deployed) -> tuple[float, list[str]]:
    """Seconds until nothing was held, and what was when the time was over."""
    begun_s = time.monotonic()
    while held := await asyncio.to_thread(deployed.held):
        if time.monotonic() - begun_s > _IDLE_S:
            break
        await asyncio.sleep(0.1)
    return time.monotonic() - begun_s, held


def _counted(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in sorted(errors.items())) or "none"


# --- a killed worker -----------------------------------------------------------------------------------


async def kill(deployed: Deployed, victim: str, sizes: Sizes) -> Found:
    """Kill a worker (-9) under load: measure how long no request was answered, and check that its successor serves."""
    stop = asyncio.Event()
    client = asyncio.create_task(_endless(deployed.url, sizes, stop))
    try:
        await asyncio.sleep(3.0)
        before = deployed.instance(victim)
        killed_s = time.perf_counter()
        deployed.send(victim, signal.SIGKILL)
        back_s = await _successor(deployed, victim, before, sizes.kill_s)
        await asyncio.sleep(3.0)
    finally:
        stop.set()
    records = await client
    after = [record for record in records if record.planned_s > killed_s]
    errors = Counter(record.error for record in records if not record.is_ok)
    served = [record.planned_s - killed_s for record in after if record.is_ok]
    idle_s, held = await _idle(deployed)
    rows = [
        Row(
            what=f"kill -9 of the {victim} worker: all serve again after",
            value="never" if back_s is None else f"{back_s:.1f} s",
            bar="at all",
            met=back_s is not None,
        ),
        Row(
            what="first request after it that was answered, and held when idle again",
            value=f"sent {min(served):.1f} s after; {'; '.join(held) or 'nothing'} held" if served else "none",
            bar="one; nothing",
            met=bool(served) and not held,
        ),
        Row(what="requests meanwhile", value=f"{len(records)}, errors: {_counted(errors)}"),
    ]
    detail = {"back_s": back_s, "requests": len(records), "errors": dict(errors), "held": held, "idle_s": idle_s}
    return rows, detail


async def _endless(url: str, sizes: Sizes, stop: asyncio.Event) -> list[Record]:
    """Eight clients, one request after the other until `stop`; those under way are answered first."""
    records: list[Record] = []

    async def lane(number: int) -> None:
        given = tokens.prompts(8, sizes.cancel_isl, seed=sizes.seed + 100 + number)
        for prompt in itertools.cycle(given):
            if stop.is_set():
                return
            sent = await tokens.send(url, [prompt], osl=64, concurrency=1, extra=tokens.SAMPLED, timeout_s=60.0)
            records.extend(sent)
            if not sent[0].is_ok:
                await asyncio.sleep(0.5)  # as a client that tries again does

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(lane(number))
    return records


async def _successor(deployed: Deployed, victim: str, before: str | None, within_s: float) -> float | None:
    begun_s = time.monotonic()
    while deployed.instance(victim) in (None, before):
        if time.monotonic() - begun_s > within_s:
            return None
        await asyncio.sleep(0.05)
    try:
        await asyncio.to_thread(deployed.wait_whole, max(1.0, within_s - (time.monotonic() - begun_s)))
    except NotServing:
        return None
    return time.monotonic() - begun_s
