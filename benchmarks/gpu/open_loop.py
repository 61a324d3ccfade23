"""Open-loop loads on several topologies: which share of the requests keeps its limits, at a ladder
of rates.

python -m benchmarks.gpu.open_loop --topologies 2A,1P1D --shapes 8192/256,1000/1000 --rates 1,2,4

A topology is a word: 4A is four aggregated workers, 2P2D two prefill and two decode workers; 2A@2
has two GPUs per worker. vllm-router:1P1D are vLLM's own servers behind vllm-router. Arrivals are
Poisson and the same for all topologies. Before each load, warm-up rounds run until two of them
agree. Two definitions of a good request are counted: first token and mean gap within their limits,
and first token and worst gap within theirs. Intervals of 95% are by bootstrap over the requests.
The result file is written after each load.

With --profile-s, `dynamo-trtllm profile` runs first, on the worker of a topology with one: its
constants are beside the result file, and `benchmarks.calibration` compares simulations with the
loads.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dynamo_trtllm.simulate.outcomes import waits_grow

from ..deployment import NotReady
from ..stream import RequestRecord
from ..summary import interval, phase_times
from . import machine, tokens
from .deployment import GpuDeployment, phases
from .main import plan_arguments, plan_of
from .plan import Plan, topology
from .vllm_router import PREFIX, RoutedServers

# in vLLM's log: a kernel that a request had to wait for
_COMPILED = "JIT compilation during inference"
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_GOOD_SHARE = 0.9  # of the requests, to count a rate as kept
# with a smaller share of good requests by both definitions, higher rates are not run
_HOPELESS = 0.2
_PROFILE_END_S = 60.0  # longest time of a profile besides its loads
_CONSTANTS_MODEL = "gpt-oss-120b"  # whose architecture the dummy weights have


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The limits of a good request, in seconds. A request that failed is not good."""

    name: str
    ttft_s: float
    mean_gap_s: float = math.inf
    worst_gap_s: float = math.inf

    def is_met(self, record: RequestRecord) -> bool:
        """Return True if the request kept all limits."""
        return (
            record.is_ok
            and ttft_s(record) <= self.ttft_s
            and mean_gap_s(record) <= self.mean_gap_s
            and worst_gap_s(record) <= self.worst_gap_s
        )


def ttft_s(record: RequestRecord) -> float:
    """Return the time from the planned arrival to the first token."""
    return math.inf if record.first_s is None else record.first_s - record.planned_s


def mean_gap_s(record: RequestRecord) -> float:
    """Return the mean time between two tokens (TPOT)."""
    if record.first_s is None or record.last_s is None or record.output_tokens < 2:
        return 0.0
    return (record.last_s - record.first_s) / (record.output_tokens - 1)


def worst_gap_s(record: RequestRecord) -> float:
    """Return the longest time between two events of the stream."""
    return max(record.gaps_s, default=0.0)


def slos(args: argparse.Namespace) -> list[Slo]:
    """Return the definitions of a good request: each limit of the mean gap, then each of the worst
    gap.
    """
    ttft = args.slo_ttft_ms / 1000
    name = f"ttft_{ttft:g}s"
    mean = [
        Slo(name=f"{name}_tpot_{ms:g}ms", ttft_s=ttft, mean_gap_s=ms / 1000)
        for ms in args.slo_mean_gap_ms
    ]
    worst = [
        Slo(name=f"{name}_gap_{ms:g}ms", ttft_s=ttft, worst_gap_s=ms / 1000)
        for ms in args.slo_worst_gap_ms
    ]
    return mean + worst


# --- statistics -----------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, one of the values; NaN without values."""
    if not values:
        return math.nan
    index = min(len(values) - 1, int(share * len(values)))
    return sorted(values)[index]


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def cell(
    word: str,
    shape: tuple[int, int],
    rate: float,
    records: Sequence[RequestRecord],
    gpus: int,
    limits: Sequence[Slo],
) -> dict[str, Any]:
    """Return the results of one load, with an interval beside each value.

    Args:
        word: the topology.
        shape: tokens of a prompt and of an answer.
        rate: requests per second that were sent.
        records: all requests.
        gpus: GPUs of all workers of the topology.
        limits: definitions of a good request.
    """
    good = [record for record in records if record.is_ok]
    in_order = sorted(good, key=lambda record: record.planned_s)
    found: dict[str, Any] = {
        "topology": word,
        "gpus": gpus,
        "input_tokens": shape[0],
        "output_tokens": shape[1],
        "requests_per_s": rate,
        "requests": len(records),
        "failed": len(records) - len(good),
        "is_saturated": waits_grow([ttft_s(record) for record in in_order]),
    }
    intervals: dict[str, Any] = {}
    for name, of in (("ttft_ms", ttft_s), ("tpot_ms", mean_gap_s), ("worst_gap_ms", worst_gap_s)):
        values = [1000 * of(record) for record in good]
        found[name] = {
            label: round(quantile(values, share), 1) for label, share in _QUANTILES.items()
        }
        intervals[name] = {
            label: [round(limit, 1) for limit in interval(values, partial(quantile, share=share))]
            for label, share in _QUANTILES.items()
        }
    met = {limit.name: [float(limit.is_met(record)) for record in records] for limit in limits}
    found["goodput_percent"] = {name: round(100 * mean(values), 1) for name, values in met.items()}
    intervals["goodput_percent"] = {
        name: [round(100 * bound, 1) for bound in interval(values, mean)]
        for name, values in met.items()
    }
    found["good_requests_per_s_per_gpu"] = {
        name: round(rate * mean(values) / gpus, 3) for name, values in met.items()
    }
    return found | phase_times(good) | {"intervals_95": intervals}


def kept_rates(cells: Sequence[dict[str, Any]]) -> list[tuple[str, str, str, float, float]]:
    """Return (topology, shape, limits, highest rate that was kept, the same per GPU) of each
    ladder.
    """
    found: dict[tuple[str, str, str], tuple[float, float]] = {}
    for one_cell in cells:
        shape = f"{one_cell['input_tokens']}/{one_cell['output_tokens']}"
        for name, percent in one_cell["goodput_percent"].items():
            key = (one_cell["topology"], shape, name)
            is_kept = percent >= 100 * _GOOD_SHARE
            rate = one_cell["requests_per_s"] if is_kept else 0.0
            rates = (rate, rate / one_cell["gpus"])
            found[key] = max(found.get(key, rates), rates)
    return [(*key, *rates) for key, rates in found.items()]


# --- loads ----------------------------------------------------------------------------------------


async def warm(
    url: str, shape: tuple[int, int], rate: float, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Run rounds of a load until two of them agree, at most `--warm-rounds`.

    Return the figures of each round.
    """
    rounds: list[dict[str, float]] = []
    for number in range(args.warm_rounds):
        records = await load(
            url, shape, rate, args, seconds=args.warm_s, seed=args.seed + 1000 + number
        )
        good = [record for record in records if record.is_ok]
        rounds.append(
            {
                "ttft_p90_ms": 1000 * quantile([ttft_s(record) for record in good], 0.9),
                "worst_gap_p90_ms": 1000 * quantile([worst_gap_s(record) for record in good], 0.9),
            }
        )
        if number and agree(rounds[-2], rounds[-1], args.agree):
            break
    return rounds


def agree(first: dict[str, float], second: dict[str, float], share: float) -> bool:
    """Return True if no figure of two rounds differs by more than this share."""
    return all(
        abs(first[name] - second[name]) <= share * max(first[name], second[name]) for name in first
    )


async def load(
    url: str,
    shape: tuple[int, int],
    rate: float,
    args: argparse.Namespace,
    *,
    seconds: float,
    seed: int,
) -> list[RequestRecord]:
    """Send Poisson arrivals for some seconds, at most `--cell-requests`, and wait for their
    ends.
    """
    count = min(args.cell_requests, math.ceil(2 * rate * seconds) + 10)
    given = tokens.prompts(count, shape[0], seed)
    return await tokens.send(
        url,
        given,
        osl=shape[1],
        concurrency=1,
        extra=tokens.SAMPLED_WITH_IDS,
        rate=rate,
        seconds=seconds,
        seed=seed,
    )


def num_devices(workers: Sequence[dict[str, Any]]) -> int:
    """Return the number of GPUs of all workers; without GPUs, the number of workers."""
    return sum(1 if worker["devices"] == "cpu" else len(worker["devices"]) for worker in workers)


class Ladder:
    """The loads of one command."""

    def __init__(self, args: argparse.Namespace, plan: Plan) -> None:
        self._args = args
        self._plan = plan
        self._limits = slos(args)
        self._until_s = time.monotonic() + args.budget_s
        self.result: dict[str, Any] = {
            "what": "open-loop",
            "commit": machine.commit(),
            "machine": machine.machine(),
            "versions": machine.versions(),
            "setup": plan.setup(),
            "load": (
                f"Poisson arrivals, {args.cell_s:g} s or {args.cell_requests} requests, token ids,"
                " temperature 1"
            ),
            "starts": [],
            "cells": [],
            "not_run": [],
        }

    async def run(self) -> None:
        """Run all topologies. What failed or had no time left is named in the result."""
        for word in self._args.topologies:
            workers = topology(self._plan, word.removeprefix(PREFIX))
            logs = self._args.out.parent / "logs"
            deployment: GpuDeployment | RoutedServers
            if word.startswith(PREFIX):
                deployment = RoutedServers(self._plan, workers, logs)
            else:
                deployment = GpuDeployment(self._plan, workers, logs / f"{word}.log")
            try:
                say(
                    f"{word}: starting {len(workers)} workers,"
                    f" {self._until_s - time.monotonic():.0f} s left"
                )
                deployment.start()  # blocks: the servers end with the thread that started them
                start = {
                    "topology": word,
                    "ready_s": round(deployment.started_s, 1),
                    **phases(deployment.lines),
                }
                self.result["starts"].append(start)
                say(f"{word}: ready after {deployment.started_s:.1f} s")
                if self._args.profile_s and isinstance(deployment, GpuDeployment):
                    self._profile(deployment)
                await self._loads(word, deployment, num_devices(workers))
            except (NotReady, OSError) as exc:
                self._skip(f"{word}: {type(exc).__name__}: {exc}"[-800:])
            finally:
                deployment.stop()

    def _profile(self, deployment: GpuDeployment) -> None:
        """Let the only worker learn the times of its steps, and write its constants."""
        (name,) = deployment.workers
        setup = self._plan.setup()
        flags = {
            "--url": deployment.health_url(name),
            "--frontend-url": deployment.url,
            "--seconds": str(self._args.profile_s),
            "--gpu": self._args.profile_gpu,
            "--engine": self._plan.engine,
            "--engine-version": machine.versions().get(self._plan.engine, "unknown"),
            "--kv-block-size": str(setup["engine_arguments"].get("block_size", 16)),
            "--max-num-tokens": str(self._plan.max_num_tokens),
            "--max-batch-size": str(self._plan.max_batch_size),
            "--out": str(self._args.out.with_suffix(".yaml")),
        }
        argv = [sys.executable, "-m", "dynamo_trtllm.cli.profile", _CONSTANTS_MODEL]
        for flag, value in flags.items():
            argv += [flag, value]
        self._args.out.parent.mkdir(parents=True, exist_ok=True)
        begun_s = time.monotonic()
        done = subprocess.run(
            argv,
            check=False,
            capture_output=True,
            text=True,
            timeout=self._args.profile_s + _PROFILE_END_S,
        )
        self.result["profile"] = {
            "seconds": round(time.monotonic() - begun_s, 1),
            "exit_status": done.returncode,
            "output": (done.stdout + done.stderr)[-800:],
        }
        say(f"profile of {name}: {self.result['profile']}")

    async def _loads(self, word: str, deployment: GpuDeployment | RoutedServers, gpus: int) -> None:
        for shape, rates in self._args.loads:
            for rate in rates:
                name = f"{word} {shape[0]}/{shape[1]} at {rate:g}/s"
                if self._until_s - time.monotonic() < self._args.cell_s:
                    self._skip(f"{name}: no time left")
                    continue
                began_at = len(deployment.lines)
                rounds = await warm(deployment.url, shape, rate, self._args)
                warmed_at = len(deployment.lines)
                records = await load(
                    deployment.url,
                    shape,
                    rate,
                    self._args,
                    seconds=self._args.cell_s,
                    seed=self._args.seed,
                )
                if not records:
                    self._skip(f"{name}: no request was sent")
                    continue
                found = cell(word, shape, rate, records, gpus, self._limits) | {
                    "warm_up": rounds,
                    "kernels_compiled_in_warm_up": compiled(deployment.lines[began_at:warmed_at]),
                    "kernels_compiled": compiled(deployment.lines[warmed_at:]),
                }
                self.result["cells"].append(found)
                self._write()
                say(line(found))
                if max(found["goodput_percent"].values()) < 100 * _HOPELESS:
                    self._skip(
                        f"{name}: higher rates of this shape, because this one is far too high"
                    )
                    break

    def _skip(self, why: str) -> None:
        say(why)
        self.result["not_run"].append(why)
        self._write()

    def _write(self) -> None:
        self._args.out.parent.mkdir(parents=True, exist_ok=True)
        self._args.out.write_bytes(
            msgspec.json.format(msgspec.json.encode(self.result), indent=1) + b"\n"
        )


def compiled(lines: Sequence[str]) -> int:
    """Return how often vLLM's log says that a kernel was compiled during inference."""
    return sum(_COMPILED in line for line in lines)


def line(found: dict[str, Any]) -> str:
    """Return the results of one load as a line of text."""
    shares = ", ".join(
        f"{name} {percent:g}% [{low:g}, {high:g}]"
        for (name, percent), (low, high) in zip(
            found["goodput_percent"].items(),
            found["intervals_95"]["goodput_percent"].values(),
            strict=True,
        )
    )
    ttft = found["ttft_ms"]
    gap = found["worst_gap_ms"]
    parts: tuple[str, ...] = (
        (
            f"{found['topology']} {found['input_tokens']}/{found['output_tokens']} at"
            f" {found['requests_per_s']:g}/s"
        ),
        f"{found['requests']} requests, {found['failed']} failed",
        (
            f"TTFT {ttft['p50']:g}/{ttft['p90']:g}/{ttft['p99']:g} ms, worst gap"
            f" {gap['p50']:g}/{gap['p99']:g} ms"
        ),
        shares,
        f"{found['kernels_compiled']} kernels compiled",
    )
    for name, times in found.get("phase_ms", {}).items():
        parts += (f"{name} {times['p50']:.2f}/{times['p99']:.2f} ms",)
    if "named_ttft_percent" in found:
        parts += (f"in phases: {found['named_ttft_percent']['frontend']['mean']:.2f}% of TTFT",)
    return "; ".join(parts)


def say(text: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# --- command line ---------------------------------------------------------------------------------


def _numbers(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if not all(number > 0 for number in found):
        raise argparse.ArgumentTypeError("expected positive numbers")
    return found


def _shapes(text: str) -> list[tuple[int, int]]:
    return [
        (int(inputs), int(outputs))
        for inputs, outputs in (part.split("/") for part in text.split(","))
    ]


def _loads(text: str) -> list[tuple[tuple[int, int], list[float]]]:
    """Return each shape with its only rate."""
    found: list[tuple[tuple[int, int], list[float]]] = []
    for part in text.split(","):
        shape_text, _, rate = part.partition("@")
        (shape,) = _shapes(shape_text)
        found.append((shape, _numbers(rate)))
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exit with status 2 on errors."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.open_loop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan_arguments(parser)
    _add_loads(parser)
    _add_limits(parser)
    add = parser.add_argument
    add(
        "--budget-s", default=570.0, type=float, help="begin no load after this time (default: 570)"
    )
    day = time.strftime("%Y-%m-%d", time.gmtime())
    add(
        "--out",
        type=Path,
        default=Path(f"benchmarks/results/open-loop-{day}.json"),
        help="the result file",
    )
    args = parser.parse_args(argv)
    needs_tokenizer = any(word.startswith(PREFIX) for word in args.topologies)
    args.only = ["vllm-router"] if needs_tokenizer else []
    if args.loads is None:
        args.loads = [(shape, args.rates) for shape in args.shapes]
    if args.profile_s and args.topologies != ["1A"]:
        parser.error("--profile-s needs --topologies 1A")
    try:
        for word in args.topologies:
            topology(plan_of(args, None), word.removeprefix(PREFIX))
    except ValueError as exc:
        parser.error(str(exc))
    return args


def _add_loads(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that define deployments and loads."""
    add = parser.add_argument
    add(
        "--topologies",
        default="2A,1P1D",
        type=lambda text: text.split(","),
        help="comma-separated topologies",
    )
    add("--shapes", default="8192/256,1000/1000", type=_shapes, help="comma-separated ISL/OSL")
    add(
        "--rates",
        default="1,2,4",
        type=_numbers,
        help="comma-separated requests per second, rising",
    )
    add(
        "--loads",
        type=_loads,
        help="comma-separated ISL/OSL@RATE, such as 8192/256@2,128/256@24, instead of --shapes and"
        " --rates",
    )
    add(
        "--profile-s",
        default=0.0,
        type=float,
        help="before the loads of 1A, run dynamo-trtllm profile with loads of so many seconds",
    )
    add("--profile-gpu", default="h200", help="the GPU model, for its constants (default: h200)")
    add(
        "--cell-s",
        default=60.0,
        type=float,
        help="longest time of arrivals of one load (default: 60)",
    )
    add("--cell-requests", default=200, type=int, help="most requests of one load (default: 200)")
    add(
        "--warm-s",
        default=10.0,
        type=float,
        help="time of arrivals of a warm-up round (default: 10)",
    )
    add("--warm-rounds", default=5, type=int, help="most warm-up rounds of a load (default: 5)")
    add(
        "--agree",
        default=0.15,
        type=float,
        help="share by which two warm-up rounds may differ (default: 0.15)",
    )
    add("--seed", default=7, type=int, help="of prompts and arrivals (default: 7)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the limits of a good request."""
    add = parser.add_argument
    add(
        "--slo-ttft-ms",
        default=2000.0,
        type=float,
        help="limit of the time to the first token (default: 2000)",
    )
    add(
        "--slo-mean-gap-ms",
        default="20,25,40",
        type=_numbers,
        help="limits of the mean gap (default: 20,25,40)",
    )
    add(
        "--slo-worst-gap-ms",
        default="100,200",
        type=_numbers,
        help="limits of the worst gap (default: 100,200)",
    )


def summary(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a line per topology, shape and definition: the highest rate of which 90% of the
    requests were good.
    """
    for word, shape, name, rate, per_gpu in kept_rates(cells):
        kept = f"{rate:g}/s ({per_gpu:.2f}/s per GPU)" if rate else "no rate"
        yield f"{word} {shape} {name}: {kept} with at least {_GOOD_SHARE:.0%} good"


def main() -> None:
    """Run the loads. The exit status is 1 if none has a result."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="open-loop-") as folder:
        ladder = Ladder(args, plan_of(args, Path(folder)))
        asyncio.run(ladder.run())
    for row in summary(ladder.result["cells"]):
        say(row)
    raise SystemExit(not ladder.result["cells"])


if __name__ == "__main__":
    main()
