"""Compares this frontend and worker with vLLM's own server, with the same engine arguments and
prompts.

With several GPUs both run at the same time, each on half of the GPUs, and swap GPUs afterwards.
With one GPU they run one after the other.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import tokens
from .deployment import GpuDeployment, phases
from .machine import wait_free
from .plan import Plan, single
from .result import Row
from .scenario import ScenarioResult, Sizes
from .server import vllm_server

OURS = "ours"
THEIRS = "vLLM's server"
_THROUGHPUT_BAR = 0.98
_ADDED_TTFT_BAR_MS = 10.0
_SHORT = 128
_START_S = 150.0  # of both servers and a round


class ArmResults:
    """The results of all rounds of one arm: this project, or vLLM's server."""

    def __init__(self) -> None:
        self.tokens_per_s: list[float] = []
        self.itl_p50_ms: list[float] = []
        self.ttft_ms: dict[int, list[float]] = {}
        self.errors = 0

    def detail(self) -> dict[str, Any]:
        return {
            "tokens_per_s": self.tokens_per_s,
            "itl_p50_ms": self.itl_p50_ms,
            "ttft_ms": {str(isl): values for isl, values in self.ttft_ms.items()},
            "errors": self.errors,
        }


async def run(
    plan: Plan, sizes: Sizes, logs: Path, *, places: int, until_s: float
) -> ScenarioResult:
    """Compare both arms.

    Args:
        plan: engine, model and GPUs.
        sizes: number and length of the requests.
        logs: folder for the servers' logs.
        places: 2 to measure again with the GPUs swapped.
        until_s: time on the monotonic clock after which no round starts.

    Raises:
        NotReady: a server did not become ready.
    """
    results = {OURS: ArmResults(), THEIRS: ArmResults()}
    starts: dict[str, Any] = {}
    for number, placement in enumerate(_placements(len(plan.gpus), places)):
        if time.monotonic() + _START_S > until_s and number and len(plan.gpus) > 1:
            break  # no time for another start, and one placement is enough
        with ExitStack() as stack:
            urls = await _start(stack, plan, placement, logs / f"overhead-{number}", starts)
            await _warm(urls, sizes)
            for turn in range(sizes.overhead_rounds):
                if turn and time.monotonic() > until_s:
                    break
                order = list(urls) if turn % 2 == 0 else list(reversed(urls))
                await _alone(urls, sizes, results, seed=100 * number + turn)
                for arm in order:
                    await _loaded(urls[arm], sizes, results[arm], seed=100 * number + turn)
    return rows(results), {arm: measured.detail() for arm, measured in results.items()} | {
        "starts": starts
    }


def _placements(gpus: int, places: int) -> list[dict[str, int]]:
    """Return for each placement which arms run at the same time, and on which half of the GPUs."""
    if gpus < 2:
        return [{OURS: 0}, {THEIRS: 0}]
    return [{OURS: 0, THEIRS: 1}, {OURS: 1, THEIRS: 0}][:places]


async def _start(
    stack: ExitStack, plan: Plan, placement: dict[str, int], logs: Path, starts: dict[str, Any]
) -> dict[str, str]:
    """Start the arms of a placement. Return their URLs when all are ready."""
    server = None
    if THEIRS in placement:
        gpus = plan.halves[placement[THEIRS]]
        wait_free(gpus)
        server = vllm_server(plan, gpus, logs.with_name(logs.name + "-vllm.log"))
        stack.callback(server.stop)
        server.begin()
    urls = {}
    if OURS in placement:
        log = logs.with_name(logs.name + "-ours.log")
        deployment = GpuDeployment(plan, single(plan, placement[OURS]), log)
        stack.callback(deployment.stop)
        # in this thread, because its servers end with the thread that started them
        deployment.start()
        urls[OURS] = deployment.url
        starts.setdefault(OURS, []).append(
            {"seconds": deployment.started_s} | phases(deployment.lines)
        )
    if server is not None:
        await asyncio.to_thread(server.wait)
        urls[THEIRS] = server.url
        starts.setdefault(THEIRS, []).append({"seconds": server.started_s} | phases(server.lines))
    return urls


async def _warm(urls: dict[str, str], sizes: Sizes) -> None:
    """Run a round that is not measured, because kernels are compiled at the first batch of each
    size.
    """
    prompts = tokens.prompts(sizes.overhead_requests, sizes.overhead_isl, seed=sizes.seed + 5)
    options: dict[str, Any] = {"osl": sizes.overhead_osl, "extra": tokens.SAMPLED}

    async def warm(url: str) -> None:
        await tokens.send(url, prompts[:4], concurrency=1, **options)
        await tokens.send(url, prompts, concurrency=sizes.overhead_concurrency, **options)

    await asyncio.gather(*map(warm, urls.values()))


async def _alone(
    urls: dict[str, str], sizes: Sizes, results: dict[str, ArmResults], *, seed: int
) -> None:
    """Measure TTFT with one request at a time, alternating between the arms so that drift affects
    both.
    """
    for isl in (sizes.overhead_isl, _SHORT):
        prompts = tokens.prompts(
            sizes.alone_requests, isl, seed=sizes.seed + isl + 7919 * (seed + 1)
        )
        for number, prompt in enumerate(prompts):
            for arm in list(urls) if number % 2 == 0 else list(reversed(urls)):
                (record,) = await tokens.send(
                    urls[arm], [prompt], osl=8, concurrency=1, extra=tokens.SAMPLED
                )
                if record.is_ok and record.first_s is not None:
                    results[arm].ttft_ms.setdefault(isl, []).append(
                        (record.first_s - record.planned_s) * 1e3
                    )
                else:
                    results[arm].errors += 1


async def _loaded(url: str, sizes: Sizes, results: ArmResults, *, seed: int) -> None:
    """Measure one arm under load."""
    prompts = tokens.prompts(
        sizes.overhead_requests, sizes.overhead_isl, seed=sizes.seed + 104729 * (seed + 1)
    )
    options: dict[str, Any] = {"concurrency": sizes.overhead_concurrency, "extra": tokens.SAMPLED}
    summary, records = await tokens.measure(url, prompts, osl=sizes.overhead_osl, **options)
    results.tokens_per_s.append(summary["tokens_per_s"])
    if summary["itl_ms"]:
        results.itl_p50_ms.append(summary["itl_ms"]["p50"])
    results.errors += sum(not record.is_ok for record in records)


def rows(results: dict[str, ArmResults]) -> list[Row]:
    """Return the ratio of throughputs, the added TTFT, and the failed requests."""
    ours = results[OURS]
    theirs = results[THEIRS]
    compared = [_throughput(ours.tokens_per_s, theirs.tokens_per_s)]
    common = sorted(set(ours.ttft_ms) & set(theirs.ttft_ms), reverse=True)
    compared += [_first_token(isl, ours.ttft_ms[isl], theirs.ttft_ms[isl]) for isl in common]
    errors = f"{ours.errors}, {theirs.errors}"
    is_met = not ours.errors + theirs.errors
    return [
        *compared,
        Row(what="failed requests, ours and theirs", value=errors, bar="none", met=is_met),
    ]


def _throughput(ours: Sequence[float], theirs: Sequence[float]) -> Row:
    what = "output tokens/s under load, ours / vLLM's own server, median of the rounds' ratios"
    if not ours or not theirs or not statistics.median(theirs):
        return Row(what=what, value="not measured", bar=f">= {_THROUGHPUT_BAR}", met=False)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
    ratio = statistics.median(ratios)
    speeds = f"{min(ours):.0f}-{max(ours):.0f} / {min(theirs):.0f}-{max(theirs):.0f}"
    return Row(
        what=what,
        value=f"{ratio:.3f} ({len(ratios)} rounds: {min(ratios):.3f}-{max(ratios):.3f}, {speeds})",
        bar=f">= {_THROUGHPUT_BAR}",
        met=ratio >= _THROUGHPUT_BAR,
    )


def _first_token(isl: int, ours: Sequence[float], theirs: Sequence[float]) -> Row:
    mine = statistics.median(ours)
    other = statistics.median(theirs)
    return Row(
        what=f"TTFT of one request at a time, {isl} tokens: added by ours",
        value=f"{mine:.1f} - {other:.1f} = {mine - other:.1f} ms (medians of {len(ours)})",
        bar=f"< {_ADDED_TTFT_BAR_MS:g} ms",
        met=mine - other < _ADDED_TTFT_BAR_MS,
    )
