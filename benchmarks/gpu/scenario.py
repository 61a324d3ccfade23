"""Steps that run load on a ready deployment: traffic shapes, cancellations, and a killed worker."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..deployment import NotReady
from ..scrape import fetch
from ..stream import RequestRecord
from . import tokens
from .deployment import GpuDeployment
from .result import Row

ScenarioResult = tuple[list[Row], dict[str, Any]]
ShapeResults = dict[str, dict[str, Any]]  # LoadSummary and phase_ms by `ISL/OSL at CONCURRENCY`
_IDLE_S = 60.0
_SAMPLE = re.compile(r"^dynamo_trtllm_phase_seconds_(sum|count)\{([^}]*)\} (\S+)$", re.M)
_PHASE = re.compile(r'phase="([^"]+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Number and length of the requests of all steps. The targets are set for the defaults."""

    parity_prompts: int = 64
    shortest: int = 100
    longest: int = 16_000
    parity_osl: int = 32
    parity_concurrency: int = 32
    shapes: tuple[tuple[int, int, int], ...] = (
        (8192, 1024, 32),
        (1000, 2000, 64),
        (128, 1000, 64),
        (32000, 256, 8),
    )
    waves: int = 2  # requests of a shape as a multiple of its concurrency
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


# --- shapes ---------------------------------------------------------------------------------------


async def measure_shape(
    url: str, sizes: Sizes, isl: int, osl: int, concurrency: int
) -> dict[str, Any]:
    """Run one load. Return its summary, with the mean milliseconds per phase as `phase_ms`."""
    prompts = tokens.prompts(concurrency * sizes.waves, isl, seed=sizes.seed + isl + osl)
    before = await asyncio.to_thread(phase_totals, url)
    results, _ = await tokens.measure(
        url, prompts, osl=osl, concurrency=concurrency, extra=tokens.SAMPLED, seconds=sizes.shape_s
    )
    after = await asyncio.to_thread(phase_totals, url)
    split = {name: _mean(total, before.get(name, (0.0, 0.0))) for name, total in after.items()}
    return dict(results) | {"phase_ms": split}


def _mean(after: tuple[float, float], before: tuple[float, float]) -> float:
    """Return the milliseconds per request between two readings of (seconds, count)."""
    seconds_after, count_after = after
    seconds_before, count_before = before
    count = count_after - count_before
    if not count:
        return 0.0
    return round((seconds_after - seconds_before) / count * 1e3, 2)


def phase_totals(url: str) -> dict[str, tuple[float, float]]:
    """Return the frontend's totals by phase: seconds and number of requests.

    Empty if the server has no metrics.
    """
    try:
        return parse_phases(fetch(f"{url}/metrics").decode())
    except OSError:
        return {}


def parse_phases(text: str) -> dict[str, tuple[float, float]]:
    """Return the totals by phase from metrics in the Prometheus text format, summed over models."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for kind, labels, value in _SAMPLE.findall(text):
        if phase := _PHASE.search(labels):
            totals = sums if kind == "sum" else counts
            totals[phase[1]] = totals.get(phase[1], 0.0) + float(value)
    return {name: (seconds, counts.get(name, 0.0)) for name, seconds in sums.items()}


async def measure_shapes(url: str, sizes: Sizes) -> ShapeResults:
    """Run all shapes one after the other."""
    return {
        f"{isl}/{osl} at {concurrency}": await measure_shape(url, sizes, isl, osl, concurrency)
        for isl, osl, concurrency in sizes.shapes
    }


def shape_rows(arm: str, results: Mapping[str, dict[str, Any]], gpus: int) -> list[Row]:
    """Return for each shape a row with throughput, TTFT and ITL, and a row with the time per
    phase.
    """
    rows = []
    for name, one in results.items():
        rows.append(Row(what=f"{name}, {arm}", value=_format(one, max(1, gpus))))
        if split := one["phase_ms"]:
            listed = ", ".join(f"{phase} {ms:.1f}" for phase, ms in split.items())
            rows.append(Row(what=f"{name}, {arm}: mean ms per request", value=listed))
    return rows


def _format(results: dict[str, Any], gpus: int) -> str:
    first = results["ttft_ms"]
    gaps = results["itl_ms"]
    if not first or not gaps:
        return f"no answer, errors {results['errors']}"
    errors = f", errors {results['errors']}" if results["errors"] else ""
    return (
        f"{results['tokens_per_s'] / gpus:.0f} tokens/s/GPU, TTFT p50 {first['p50']:.0f} p99"
        f" {first['p99']:.0f} ms, ITL p50 {gaps['p50']:.1f} p99 {gaps['p99']:.1f} ms{errors}"
    )


# --- cancellation ---------------------------------------------------------------------------------


async def cancellations(deployment: GpuDeployment, sizes: Sizes) -> ScenarioResult:
    """Disconnect three of ten clients at random times and check that all resources are released."""
    source = random.Random(sizes.seed)
    leaving = sizes.cancel_requests * 3 // 10
    staying = sizes.cancel_requests - leaving
    prompts = tokens.prompts(sizes.cancel_requests, sizes.cancel_isl, seed=sizes.seed + 1)
    options: dict[str, Any] = {"osl": 64, "extra": tokens.SAMPLED}

    async def leave(prompt: tokens.Prompt) -> list[RequestRecord]:
        await asyncio.sleep(source.uniform(0.0, 4.0))
        wait_s = source.choice((0.005, 0.02, 0.1, 0.3, 1.0)) * source.uniform(0.5, 1.5)
        return await tokens.send(
            deployment.url, [prompt], concurrency=1, timeout_s=wait_s, **options
        )

    stayed, *left = await asyncio.gather(
        tokens.send(deployment.url, prompts[:staying], concurrency=24, **options),
        *(leave(prompt) for prompt in prompts[staying:]),
    )
    errors = Counter(record.error for record in stayed if not record.is_ok)
    gone = sum(record.error == "timeout" for records in left for record in records)
    idle_s, held = await _idle(deployment)
    rows = [
        Row(
            what=(
                f"{sizes.cancel_requests} requests, {gone} cancelled at random times: resources not"
                " released"
            ),
            value="nothing" if not held else "; ".join(held),
            bar="nothing",
            met=not held,
        ),
        Row(what="time until all KV blocks were free", value=f"{idle_s:.2f} s"),
        Row(
            what="errors of the other requests", value=_counted(errors), bar="none", met=not errors
        ),
    ]
    return rows, {"left": gone, "held": held, "idle_s": idle_s, "errors": dict(errors)}


async def _idle(deployment: GpuDeployment) -> tuple[float, list[str]]:
    """Wait until all resources are released.

    Return the seconds, and the resources held at the timeout.
    """
    begun_s = time.monotonic()
    while held := await asyncio.to_thread(deployment.held):
        if time.monotonic() - begun_s > _IDLE_S:
            break
        await asyncio.sleep(0.1)
    return time.monotonic() - begun_s, held


def _counted(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in sorted(errors.items())) or "none"


# --- a killed worker ------------------------------------------------------------------------------


async def kill_worker(deployment: GpuDeployment, victim: str, sizes: Sizes) -> ScenarioResult:
    """Kill a worker (-9) under load and measure how long the deployment takes to recover."""
    stop = asyncio.Event()
    client = asyncio.create_task(_endless(deployment.url, sizes, stop))
    try:
        await asyncio.sleep(3.0)
        before = deployment.instance(victim)
        killed_s = time.perf_counter()
        deployment.send(victim, signal.SIGKILL)
        back_s = await _successor(deployment, victim, before, sizes.kill_s)
        await asyncio.sleep(3.0)
    finally:
        stop.set()
    records = await client
    after = [record for record in records if record.planned_s > killed_s]
    errors = Counter(record.error for record in records if not record.is_ok)
    ok_s = [record.planned_s - killed_s for record in after if record.is_ok]
    idle_s, held = await _idle(deployment)
    rows = [
        Row(
            what=f"kill -9 of the {victim} worker: time until all workers were ready again",
            value="never" if back_s is None else f"{back_s:.1f} s",
            bar="any",
            met=back_s is not None,
        ),
        Row(
            what="first successful request after the kill; resources not released",
            value=(
                f"sent after {min(ok_s):.1f} s; {'; '.join(held) or 'nothing'}" if ok_s else "none"
            ),
            bar="one; nothing",
            met=bool(ok_s) and not held,
        ),
        Row(what="requests during the step", value=f"{len(records)}, errors: {_counted(errors)}"),
    ]
    detail = {
        "back_s": back_s,
        "requests": len(records),
        "errors": dict(errors),
        "held": held,
        "idle_s": idle_s,
    }
    return rows, detail


async def _endless(url: str, sizes: Sizes, stop: asyncio.Event) -> list[RequestRecord]:
    """Send requests with eight clients until `stop` is set. Return all records."""
    records: list[RequestRecord] = []

    async def lane(number: int) -> None:
        prompts = tokens.prompts(8, sizes.cancel_isl, seed=sizes.seed + 100 + number)
        for prompt in itertools.cycle(prompts):
            if stop.is_set():
                return
            sent = await tokens.send(
                url, [prompt], osl=64, concurrency=1, extra=tokens.SAMPLED, timeout_s=60.0
            )
            records.extend(sent)
            if not sent[0].is_ok:
                await asyncio.sleep(0.5)  # limits the rate of retries

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(lane(number))
    return records


async def _successor(
    deployment: GpuDeployment, victim: str, before: str | None, within_s: float
) -> float | None:
    """Wait until the victim was replaced and all workers are ready.

    Return the seconds, or None at the timeout.
    """
    begun_s = time.monotonic()
    while deployment.instance(victim) in (None, before):
        if time.monotonic() - begun_s > within_s:
            return None
        await asyncio.sleep(0.05)
    try:
        await asyncio.to_thread(
            deployment.wait_ready, max(1.0, within_s - (time.monotonic() - begun_s))
        )
    except NotReady:
        return None
    return time.monotonic() - begun_s
