"""What our frontend and worker cost beside vLLM's own server: the same engine arguments and prompts, in turns.

With two halves of GPUs both are up at once, one on each, and then change places; with one GPU, one after the other.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gpu import tokens
from benchmarks.gpu.deployed import Deployed, phases
from benchmarks.gpu.plan import Plan, single
from benchmarks.gpu.result import Row
from benchmarks.gpu.server import vllm_server
from benchmarks.gpu.steps import Found, Sizes

OURS, THEIRS = "ours", "vLLM's server"
_THROUGHPUT_BAR = 0.98
_ADDED_TTFT_BAR_MS = 10.0
_SHORT = 128
_START_S = 150.0  # of both servers and a round


class Measured:
    """All rounds of one arm."""

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


async def run(plan: Plan, sizes: Sizes, logs: Path, *, places: int, until_s: float) -> Found:
    """`places`: 2 to let the arms change places as well. `until_s`, of the monotonic clock: no round begins after it.

    Raises NotServing when a server does not come up.
    """
    found = {OURS: Measured(), THEIRS: Measured()}
    starts: dict[str, Any] = {}
    for number, sitting in enumerate(_sittings(len(plan.gpus), places)):
        if time.monotonic() + _START_S > until_s and number and len(plan.gpus) > 1:
            break  # no time for another start; one round in each place is better, one place is enough
        with ExitStack() as stack:
            urls = await _start(stack, plan, sitting, logs / f"overhead-{number}", starts)
            await _warm(urls, sizes)
            for turn in range(sizes.overhead_rounds):
                if turn and time.monotonic() > until_s:
                    break
                order = list(urls) if turn % 2 == 0 else list(reversed(urls))
                await _alone(urls, sizes, found, seed=100 * number + turn)
                for arm in order:
                    await _loaded(urls[arm], sizes, found[arm], seed=100 * number + turn)
    return rows(found), {arm: measured.detail() for arm, measured in found.items()} | {"starts": starts}


def _sittings(gpus: int, places: int) -> list[dict[str, int]]:
    """Which arm runs on which half of the GPUs, at the same time within one sitting."""
    if gpus < 2:
        return [{OURS: 0}, {THEIRS: 0}]
    return [{OURS: 0, THEIRS: 1}, {OURS: 1, THEIRS: 0}][:places]


async def _start(
    stack: ExitStack, plan: Plan, sitting: dict[str, int], logs: Path, starts: dict[str, Any]
) -> dict[str, str]:
    """The URLs, once all serve."""
    server = None
    if THEIRS in sitting:
        server = vllm_server(plan, sitting[THEIRS], logs.with_name(logs.name + "-vllm.log"))
        stack.callback(server.stop)
        server.begin()
    urls = {}
    if OURS in sitting:
        log = logs.with_name(logs.name + "-ours.log")
        deployed = Deployed(plan, single(plan, sitting[OURS]), log)
        stack.callback(deployed.stop)
        deployed.start()  # in this thread: its servers die with the thread that started them
        urls[OURS] = deployed.url
        starts.setdefault(OURS, []).append({"seconds": deployed.started_s} | phases(deployed.lines))
    if server is not None:
        await asyncio.to_thread(server.wait)
        urls[THEIRS] = server.url
        starts.setdefault(THEIRS, []).append({"seconds": server.started_s} | phases(server.lines))
    return urls


async def _warm(urls: dict[str, str], sizes: Sizes) -> None:
    """A whole round that is not counted, on both at once: kernels are compiled when a batch of a size first comes."""
    given = tokens.prompts(sizes.overhead_requests, sizes.overhead_isl, seed=sizes.seed + 5)
    asked: dict[str, Any] = {"osl": sizes.overhead_osl, "extra": tokens.SAMPLED}

    async def warm(url: str) -> None:
        await tokens.send(url, given[:4], concurrency=1, **asked)
        await tokens.send(url, given, concurrency=sizes.overhead_concurrency, **asked)

    await asyncio.gather(*map(warm, urls.values()))


async def _alone(urls: dict[str, str], sizes: Sizes, found: dict[str, Measured], *, seed: int) -> None:
    """One request at a time, the arms in turn after each request, so that drift meets both."""
    for isl in (sizes.overhead_isl, _SHORT):
        given = tokens.prompts(sizes.alone_requests, isl, seed=sizes.seed + isl + 7919 * (seed + 1))
        for number, prompt in enumerate(given):
            for arm in list(urls) if number % 2 == 0 else list(reversed(urls)):
                (record,) = await tokens.send(urls[arm], [prompt], osl=8, concurrency=1, extra=tokens.SAMPLED)
                if record.is_ok and record.first_s is not None:
                    found[arm].ttft_ms.setdefault(isl, []).append((record.first_s - record.planned_s) * 1e3)
                else:
                    found[arm].errors += 1


async def _loaded(url: str, sizes: Sizes, found: Measured, *, seed: int) -> None:
    given = tokens.prompts(sizes.overhead_requests, sizes.overhead_isl, seed=sizes.seed + 104729 * (seed + 1))
    asked: dict[str, Any] = {"concurrency": sizes.overhead_concurrency, "extra": tokens.SAMPLED}
    figures, records = await tokens.measure(url, given, osl=sizes.overhead_osl, **asked)
    found.tokens_per_s.append(figures["tokens_per_s"])
    if figures["itl_ms"]:
        found.itl_p50_ms.append(figures["itl_ms"]["p50"])
    found.errors += sum(not record.is_ok for record in records)


def rows(found: dict[str, Measured]) -> list[Row]:
    """The ratio of the rounds, and what is added to a first token."""
    ours, theirs = found[OURS], found[THEIRS]
    made = [_throughput(ours.tokens_per_s, theirs.tokens_per_s)]
    common = sorted(set(ours.ttft_ms) & set(theirs.ttft_ms), reverse=True)
    made += [_first_token(isl, ours.ttft_ms[isl], theirs.ttft_ms[isl]) for isl in common]
    failed = ours.errors + theirs.errors
    made.append(Row(what="failed requests, both", value=f"{ours.errors}, {theirs.errors}", bar="none", met=not failed))
    return made


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
    mine, other = statistics.median(ours), statistics.median(theirs)
    return Row(
        what=f"TTFT of one request at a time, {isl} tokens: added by ours",
        value=f"{mine:.1f} - {other:.1f} = {mine - other:.1f} ms (medians of {len(ours)})",
        bar=f"< {_ADDED_TTFT_BAR_MS:g} ms",
        met=mine - other < _ADDED_TTFT_BAR_MS,
    )
