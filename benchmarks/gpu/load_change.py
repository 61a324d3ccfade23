"""A load that changes its shape while it runs: whether elastic workers follow it.

python -m benchmarks.gpu.load_change --topologies 2E,2A --loads 8192/256@4,2000/600@6

Each topology gets all loads one after the other, without a pause between them: the requests of one
still run when the next one begins. 2E are two elastic workers, with `--router-mode slo` and a
planner; other topologies (see `open_loop`) have the router mode of `--router-mode`. Arrivals are
Poisson and the same for all topologies.

The results of each load are those of `open_loop`. In addition, each change of the shares is listed:
when the planner decided it, when the frontend used it, and when the first request after it was
served by workers that have a share of its calls. With --set-s, the last load then goes on while
this command sets other shares, as `dynamo-trtllm shares` does: the first worker gets all prefill
calls and the others all decode calls, then the last one and the others, then all of them both.

Beside the result file, each request is a line of a .jsonl file, written when it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import orjson

from dynamo_trtllm.cluster.connect import open_discovery
from dynamo_trtllm.cluster.discovery.share_changes import change_shares
from dynamo_trtllm.config.commands import SharesConfig
from dynamo_trtllm.protocol.shares import ALL_WORK, Shares
from dynamo_trtllm.support.background import BackgroundTasks

from ..deployment import NotReady
from ..load_client import Load
from ..scrape import fetch
from ..stream import RequestRecord
from . import machine, tokens
from .deployment import GpuDeployment, phases
from .main import plan_arguments, plan_of
from .open_loop import Slo, cell, compiled, line, num_devices, say, ttft_s
from .plan import ELASTIC, MODEL_NAME, Plan, topology

_POLL_S = 0.1  # between two looks at the shares that the frontend uses
_DECISION = re.compile(r"(\S+Z) INFO \S+ planner\.decision_log: \S+ decided (change|drained): (.*)")
_EXTRA: dict[str, Any] = {**tokens.SAMPLED_WITH_IDS, "nvext": {"extra_fields": ["worker_id"]}}


class Segment(NamedTuple):
    """One of the loads."""

    input_tokens: int
    output_tokens: int
    rate: float  # requests per second


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is sent when: one item per request, in the order of their arrival."""

    arrivals_s: tuple[float, ...]
    segments: tuple[int, ...]  # the number of each request's load


def schedule(segments: Sequence[Segment], seconds: float, seed: int) -> Schedule:
    """Return Poisson arrivals: `seconds` of each load, one after the other."""
    arrivals: list[float] = []
    numbers: list[int] = []
    for number, segment in enumerate(segments):
        source = random.Random(f"{seed}-{number}")
        at_s = source.expovariate(segment.rate)
        while at_s < seconds:
            arrivals.append(number * seconds + at_s)
            numbers.append(number)
            at_s += source.expovariate(segment.rate)
    return Schedule(tuple(arrivals), tuple(numbers))


# --- changes of shares ----------------------------------------------------------------------------


class SeenShares(NamedTuple):
    """The shares of all elastic workers, as the frontend began to use them."""

    at_s: float  # seconds since 1970, up to _POLL_S late
    shares: Mapping[int, Shares]


class DecidedChange(NamedTuple):
    """A decision of the planner, or of this command, just before it writes the shares."""

    at_s: float  # seconds since 1970
    outcome: str  # of the planner; "set": by this command
    reason: str


class ServedRequest(NamedTuple):
    """When a request was sent, in seconds since 1970, and by which workers it was served."""

    sent_s: float
    prefill: int
    decode: int


def decided_changes(lines: Sequence[str]) -> list[DecidedChange]:
    """Return the changes that the planner's log names."""
    found = []
    for text in lines:
        if match := _DECISION.search(text):
            at_s = datetime.fromisoformat(match[1]).timestamp()
            found.append(DecidedChange(at_s, match[2], match[3]))
    return found


def share_changes(
    decided: Sequence[DecidedChange],
    seen: Sequence[SeenShares],
    requests: Sequence[ServedRequest],
) -> list[dict[str, Any]]:
    """Return what is known of each change, in milliseconds after the planner's decision.

    A request follows the shares if its prefill worker has a share of prefill calls, and its decode
    worker one of decode calls. A whole request follows them if its worker has a share of decode
    calls.
    """
    rows = []
    for number, change in enumerate(decided):
        end_s = decided[number + 1].at_s if number + 1 < len(decided) else float("inf")
        used = next((one for one in seen if change.at_s <= one.at_s < end_s), None)
        row: dict[str, Any] = {"decided_at_s": change.at_s, **change._asdict()}
        del row["at_s"]
        if used is not None:
            after = [one for one in requests if change.at_s <= one.sent_s < end_s]
            following = [one.sent_s for one in after if _follows(one, used.shares)]
            others = [one.sent_s for one in after if not _follows(one, used.shares)]
            row |= {
                "shares": {
                    f"{key:x}": [value.prefill, value.decode] for key, value in used.shares.items()
                },
                "used_by_frontend_ms": _after_ms(used.at_s, change),
                "first_following_ms": _after_ms(min(following), change) if following else None,
                "requests_following": len(following),
                "requests_on_other_paths": len(others),
                "others_within_1_s": sum(at_s < change.at_s + 1 for at_s in others),
            }
        rows.append(row)
    return rows


def _after_ms(at_s: float, change: DecidedChange) -> float:
    return round(1000 * (at_s - change.at_s), 1)


def _follows(request: ServedRequest, shares: Mapping[int, Shares]) -> bool:
    if shares.get(request.decode, ALL_WORK).decode == 0:
        return False
    is_whole = request.prefill == request.decode
    return is_whole or shares.get(request.prefill, ALL_WORK).prefill > 0


@asynccontextmanager
async def watched_shares(url: str) -> AsyncIterator[list[SeenShares]]:
    """Collect the shares that a frontend uses, until the end of the block. Yields the list."""
    seen: list[SeenShares] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                health = orjson.loads(await asyncio.to_thread(fetch, f"{url}/health"))
            except OSError:
                continue
            shares = {
                int(one["instance_id"]): Shares(one["prefill_share"], one["decode_share"])
                for one in health["instances"]
                if "prefill_share" in one
            }
            if not seen or seen[-1].shares != shares:
                seen.append(SeenShares(time.time(), shares))

    watching = asyncio.create_task(watch(), name="watched-shares")
    try:
        yield seen
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def set_shares(workers: Sequence[int]) -> list[tuple[str, dict[int, Shares]]]:
    """Return the shares that this command sets, one after the other, with a name of each."""

    def split(prefill: int) -> dict[int, Shares]:
        return {one: Shares(float(one == prefill), float(one != prefill)) for one in workers}

    return [
        ("the first one for prefill", split(workers[0])),
        ("the last one for prefill", split(workers[-1])),
        ("all for both", dict.fromkeys(workers, ALL_WORK)),
    ]


# --- loads ----------------------------------------------------------------------------------------


class Comparison:
    """The topologies of one command. `requests` is the .jsonl file."""

    def __init__(self, args: argparse.Namespace, plan: Plan, requests: BinaryIO) -> None:
        self._args = args
        self._plan = plan
        self._requests = requests
        self._slo = Slo(
            name=f"ttft_{args.slo_ttft_ms:g}ms_gap_{args.slo_itl_ms:g}ms",
            ttft_s=args.slo_ttft_ms / 1000,
            worst_gap_s=args.slo_itl_ms / 1000,
        )
        self._until_s = time.monotonic() + args.budget_s
        self.result: dict[str, Any] = {
            "what": "load-change",
            "commit": machine.commit(),
            "machine": machine.machine(),
            "versions": machine.versions(),
            "setup": plan.setup(),
            "load": f"Poisson arrivals, {args.segment_s:g} s of each, token ids, temperature 1",
            "early_token_pause_ms": args.early_token_pause_ms,
            "starts": [],
            "cells": [],
            "share_changes": {},
            "while_shares_were_set": {},
            "not_run": [],
        }

    async def run(self) -> None:
        """Run all topologies. What failed or had no time left is named in the result."""
        for word in self._args.topologies:
            left_s = self._until_s - time.monotonic()
            if left_s < self._needed_s():
                self._skip(f"{word}: only {left_s:.0f} s left")
                continue
            workers = topology(self._plan, word)
            log = self._args.out.parent / "logs" / f"{word}.log"
            deployment = GpuDeployment(self._plan, workers, log, self._frontend(workers))
            try:
                say(f"{word}: starting {len(workers)} workers, {left_s:.0f} s left")
                deployment.start()  # blocks: the servers end with the thread that started them
                start = {"topology": word, "ready_s": round(deployment.started_s, 1)}
                self.result["starts"].append(start | phases(deployment.lines))
                say(f"{word}: ready after {deployment.started_s:.1f} s")
                await self._loads(word, deployment, num_devices(workers))
            except (NotReady, OSError) as exc:
                self._skip(f"{word}: {type(exc).__name__}: {exc}"[-800:])
            finally:
                deployment.stop()

    def _needed_s(self) -> float:
        """Return the time that the loads of a topology take, without its start."""
        return len(self._args.loads) * float(self._args.segment_s + self._args.warm_s)

    def _frontend(self, workers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the settings of the frontend. The launcher starts a planner if limits are set."""
        args = self._args
        is_elastic = any(worker["disaggregation_mode"] == ELASTIC for worker in workers)
        mode = "slo" if is_elastic else args.router_mode
        settings: dict[str, Any] = {"router-mode": mode}
        if args.early_token_pause_ms is not None:
            settings["early-token-pause-ms"] = args.early_token_pause_ms
        if mode == "slo":
            settings |= {"slo-ttft-ms": args.slo_ttft_ms, "slo-itl-ms": args.slo_itl_ms}
        return settings

    async def _loads(self, word: str, deployment: GpuDeployment, gpus: int) -> None:
        """Run the warm-up and all loads, and write the results."""
        args = self._args
        async with watched_shares(deployment.url) as seen:
            warming, _ = await self._send(
                deployment.url, args.warm_s, args.seed + 1000, word, args.loads
            )
            say(f"{word}: warm-up done")
            warmed_at = len(deployment.lines)
            records, planned = await self._send(
                deployment.url, args.segment_s, args.seed, word, args.loads
            )
        lines = list(deployment.lines)
        for number, segment in enumerate(args.loads):
            of_segment = [
                record for record in records if planned.segments[record.index - 1] == number
            ]
            shape = (segment.input_tokens, segment.output_tokens)
            found = cell(word, shape, segment.rate, of_segment, gpus, [self._slo])
            found["kernels_compiled"] = compiled(lines[warmed_at:])
            found["paths"] = paths(of_segment)
            found["errors"] = sorted({record.error for record in of_segment if record.error})
            self.result["cells"].append(found)
            say(line(found))
        self._note_changes(word, decided_changes(lines), seen, [*warming, *records])
        if args.set_s and seen and seen[-1].shares:
            await self._set_shares(word, deployment, list(seen[-1].shares))

    def _note_changes(
        self,
        word: str,
        decided: Sequence[DecidedChange],
        seen: Sequence[SeenShares],
        records: Sequence[RequestRecord],
    ) -> None:
        """Add changes of shares to the results, and write these."""
        clock_s = time.time() - time.perf_counter()
        requests = [
            ServedRequest(clock_s + record.sent_s, *record.workers)
            for record in records
            if record.workers
        ]
        changes = share_changes(decided, seen, requests)
        self.result["share_changes"].setdefault(word, []).extend(changes)
        for change in changes:
            say(f"{word}: {change}")
        self._write()

    async def _set_shares(
        self, word: str, deployment: GpuDeployment, workers: Sequence[int]
    ) -> None:
        """Set shares while the last load goes on."""
        args = self._args
        config = SharesConfig(
            namespace=deployment.namespace, etcd_endpoints=deployment.services()["etcd"]
        )
        decided: list[DecidedChange] = []
        registered = dict.fromkeys(workers, ALL_WORK)
        async with (
            aclosing(open_discovery(config, BackgroundTasks())) as discovery,
            watched_shares(deployment.url) as seen,
        ):
            number = len(args.loads) - 1
            seconds = 3 * args.set_s
            sending = asyncio.create_task(
                self._send(deployment.url, seconds, args.seed + 2000, word, args.loads[number:])
            )
            for name, shares in set_shares(workers):
                await asyncio.sleep(0.1 * args.set_s)
                decided.append(DecidedChange(time.time(), "set", name))
                await change_shares(
                    discovery, deployment.namespace, shares, registered=registered, reason=name
                )
                await asyncio.sleep(0.9 * args.set_s)
            records, _ = await sending
        failed = sum(not record.is_ok for record in records)
        say(f"{word}: {len(records)} requests while shares were set, {failed} failed")
        self.result["while_shares_were_set"][word] = {"requests": len(records), "failed": failed}
        self._note_changes(word, decided, seen, records)

    async def _send(
        self, url: str, seconds: float, seed: int, word: str, loads: Sequence[Segment]
    ) -> tuple[list[RequestRecord], Schedule]:
        """Send `seconds` of each load. Return the records of all requests, and what was planned."""
        args = self._args
        planned = schedule(loads, seconds, seed)
        given = [
            prompt
            for number, segment in enumerate(loads)
            for prompt in tokens.prompts(
                planned.segments.count(number), segment.input_tokens, seed + number
            )
        ]
        load = Load(
            url=url,
            model=MODEL_NAME,
            requests=len(given),
            seconds=seconds * len(loads) + 60,
            timeout_s=args.timeout_s,
            arrivals_s=planned.arrivals_s,
            osls=tuple(loads[number].output_tokens for number in planned.segments),
            extra=_EXTRA,
        )
        clock_s = time.time() - time.perf_counter()

        def note(record: RequestRecord) -> None:
            row = orjson.dumps(_row(record, word, seed, planned, clock_s))
            self._requests.write(row + b"\n")
            self._requests.flush()

        client = tokens.TokensClient(load, given, note)
        try:
            return await client.run(), planned
        finally:
            client.aclose()

    def _skip(self, why: str) -> None:
        say(why)
        self.result["not_run"].append(why)
        self._write()

    def _write(self) -> None:
        content = msgspec.json.format(msgspec.json.encode(self.result), indent=1)
        self._args.out.write_bytes(content + b"\n")


def paths(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Return the number of requests of each pair of workers. One worker ran a whole request."""
    counts: dict[str, int] = {}
    for record in records:
        if record.workers is None:
            continue
        name = ">".join(f"{one:x}" for one in dict.fromkeys(record.workers))
        counts[name] = counts.get(name, 0) + 1
    return counts


def _row(
    record: RequestRecord, word: str, seed: int, planned: Schedule, clock_s: float
) -> dict[str, Any]:
    """Return a request for the .jsonl file. Times are in seconds since 1970."""
    ttft_ms = None
    if record.first_s is not None:
        ttft_ms = round(1000 * ttft_s(record), 1)
    return {
        "topology": word,
        "seed": seed,
        "segment": planned.segments[record.index - 1],
        "planned_s": round(clock_s + record.planned_s, 4),
        "ttft_ms": ttft_ms,
        "tokens": record.output_tokens,
        "error": record.error,
        "workers": None if record.workers is None else [f"{one:x}" for one in record.workers],
        "gaps_ms": [round(1000 * gap, 1) for gap in record.gaps_s],
        "phase_ms": {name: round(1000 * value, 1) for name, value in record.phase_s.items()},
    }


# --- command line ---------------------------------------------------------------------------------


def _loads(text: str) -> list[Segment]:
    """Return the loads of ISL/OSL@RATE,..."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)/(\d+)@(\d+(?:\.\d+)?)", part)
        if match is None or not float(match[3]) > 0:
            raise argparse.ArgumentTypeError(f"{part} is not ISL/OSL@RATE, such as 8192/256@4")
        found.append(Segment(int(match[1]), int(match[2]), float(match[3])))
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with status 2 on errors."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.load_change",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan_arguments(parser)
    add = parser.add_argument
    add(
        "--topologies",
        default="2E,2A",
        type=lambda text: text.split(","),
        help="comma-separated topologies (default: 2E,2A)",
    )
    add(
        "--loads",
        default="8192/256@4,2000/600@6",
        type=_loads,
        help="comma-separated ISL/OSL@RATE, in this order (default: 8192/256@4,2000/600@6)",
    )
    add("--segment-s", default=60.0, type=float, help="time of each load (default: 60)")
    add("--warm-s", default=6.0, type=float, help="time of each load of the warm-up (default: 6)")
    add(
        "--set-s",
        default=0.0,
        type=float,
        help="time of each of three shares that are set at the end (default: 0, none)",
    )
    add("--slo-ttft-ms", default=1000.0, type=float, help="limit of the TTFT (default: 1000)")
    add("--slo-itl-ms", default=100.0, type=float, help="limit of the worst gap (default: 100)")
    add(
        "--router-mode",
        default="round-robin",
        help="of topologies without elastic workers (default: round-robin)",
    )
    add(
        "--early-token-pause-ms",
        type=float,
        help="the setting of the frontend, in all topologies (default: that of the frontend)",
    )
    add("--timeout-s", default=60.0, type=float, help="longest time of a request (default: 60)")
    add("--budget-s", default=570.0, type=float, help="begin no topology that would end later")
    add("--seed", default=7, type=int, help="of prompts and arrivals (default: 7)")
    day = time.strftime("%Y-%m-%d", time.gmtime())
    add(
        "--out",
        type=Path,
        default=Path(f"benchmarks/results/load-change-{day}.json"),
        help="the result file",
    )
    args = parser.parse_args(argv)
    args.only = []
    try:
        for word in args.topologies:
            topology(plan_of(args, None), word)
    except ValueError as exc:
        parser.error(str(exc))
    return args


def summary(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per topology: which share of all requests kept the limits."""
    for word in dict.fromkeys(found["topology"] for found in cells):
        own = [found for found in cells if found["topology"] == word]
        requests = sum(found["requests"] for found in own)
        good = sum(
            found["requests"] * next(iter(found["goodput_percent"].values())) / 100 for found in own
        )
        failed = sum(found["failed"] for found in own)
        yield f"{word}: {good:.0f} of {requests} requests within the limits, {failed} failed"


def main() -> None:
    """Run the loads. The exit status is 1 if none has a result."""
    args = arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="load-change-") as folder,
        open(args.out.with_suffix(".jsonl"), "wb") as requests,
    ):
        comparison = Comparison(args, plan_of(args, Path(folder)), requests)
        asyncio.run(comparison.run())
    for row in summary(comparison.result["cells"]):
        say(row)
    sys.exit(not comparison.result["cells"])


if __name__ == "__main__":
    main()
