"""Measures whether a client that sends too much slows down others, and whether equal ones get equal
parts.

    python -m benchmarks.fairness
    python -m benchmarks.fairness --beside-dynamo

Starts a small deployment with the mock engine and API keys. Its prefill worker is the bottleneck: a
step of 0.1 s computes one prompt.

Two keys: A stays within its half of what the worker can compute, and B sends ten times its half.
First A runs alone, then with B. This is done with two arrivals of A: in bursts, as of a program
with many calls at once, and at random. B delays a request of A by what is left of the step that
runs. How much that is in percent depends on how long the requests of A wait for each other.

Equal keys: four keys send 1.5, 2, 5 and 10 times their share. Jain's index of the tokens that they
got is 1 if all got the same, and 0.25 if one got everything.

With --beside-dynamo, the first four loads are also run on NVIDIA Dynamo's frontend with its mock
workers, which is installed from PyPI. It has no API keys. Its times of steps are others, so what
its workers can compute is measured first, and A and B send the same parts of that.

  sent, ok    requests, and how many of them had their first token until the end
  tok_s       tokens of prompts and outputs of the key per second
  p50, p99    time to first token in ms
  growth      of p99 over A alone
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import orjson

from dynamo_trtllm.access.api_keys import ApiKey, digest_of, new_key
from dynamo_trtllm.access.keys_file import add_key
from dynamo_trtllm.support.network.addresses import free_ports

from .deployment import NAME_VARIABLE, LaunchedDeployment, NotReady
from .load_client import Client, Load
from .plane import dynamo
from .plane.points import STEP_S, Engines
from .plane.stack import MODEL, Stack
from .scrape import fetch
from .stream import RequestRecord

_READY_S = 120.0
_TIMEOUT_S = 600.0  # of a request
_WORDS = 440  # of a prompt: with the rest of the conversation, nearly as many tokens as a step has
_OSL = 16
_STEP_TOKENS = 512
_STEP_S = 0.001
_PREFILL_TOKEN_S = 200e-6  # a prompt takes as long as one of thousands of tokens on a GPU
# Requests per second that the prefill worker can compute.
_CAPACITY: Final = 1 / (_STEP_S + _STEP_TOKENS * _PREFILL_TOKEN_S)
_BURST = 32
_WARM_UP_S: Final = tuple(0.2 * number for number in range(20))
_A_PART = 0.7  # of its half that A sends
_EXCESS: Final = (1.5, 2.0, 5.0, 10.0)  # times its share that each equal key sends
_EQUAL_KEYS = ("c", "d", "e", "f")
_BEGIN_S = 3.0  # until all client processes have started
_SETTLE_S = 15.0  # requests of this time are sent, and not counted
# Of Dynamo's mock engine, for which a step with one prompt takes about as long as here.
_DYNAMO_SPEED = 0.2
_FLOOD_RATE = 100.0  # requests per second, more than its worker can compute
_END_S = 6.0  # after the last request of a load: those of A have ended, and the others are canceled


class Deployment(LaunchedDeployment):
    """One prefill and one decode worker with the mock engine, and a frontend with API keys."""

    def __init__(self, keys_file: Path) -> None:
        super().__init__(workers=("prefill-1", "decode-1"), model="mock", ready_s=_READY_S)
        self._keys_file = keys_file

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the frontend is ready, which it says without a key. Raise NotReady."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                fetch(f"{self.url}/ready")
            except OSError as exc:
                if time.monotonic() > until:
                    raise NotReady("\n".join([str(exc), *self.lines[-30:]])) from None
                time.sleep(0.05)
                continue
            return

    def description(self) -> dict[str, Any]:
        """See `LaunchedDeployment.description`."""
        prefill = {
            "step_s": _STEP_S,
            "prefill_tokens_per_step": _STEP_TOKENS,
            "prefill_token_s": _PREFILL_TOKEN_S,
        }
        return {
            "namespace": self.namespace,
            "services": self.services(),
            "frontend": {
                "http-host": "127.0.0.1",
                "http-port": self.http_port,
                "api-keys-file": str(self._keys_file),
            },
            "workers": [
                _worker("prefill-1", "prefill", prefill),
                _worker("decode-1", "decode", {"step_s": 0.005}),
            ],
        }


class PacedDynamo(dynamo.Dynamo):
    """Dynamo whose prefill worker computes one prompt per step, as that of `Deployment`."""

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        """Return the arguments for a worker. Later ones replace earlier ones."""
        arguments = super().worker(role, pace_s)
        if role != "prefill":
            return arguments
        paced = ("--speedup-ratio", str(_DYNAMO_SPEED))
        return (*arguments, *paced, "--max-num-batched-tokens", str(_STEP_TOKENS))


def _worker(name: str, mode: str, engine_args: Mapping[str, float]) -> dict[str, Any]:
    flags = {"model": "mock", "engine": "mock", "override-engine-args": dict(engine_args)}
    return {
        "name": name,
        "disaggregation_mode": mode,
        "flags": flags,
        "env": {NAME_VARIABLE: name},
    }


def at_random(rate: float, seconds: float, seed: int = 1) -> Iterator[float]:
    """Yield the times of requests that arrive independently of each other."""
    source = random.Random(seed)
    at_s = source.expovariate(rate)
    while at_s < seconds:
        yield at_s
        at_s += source.expovariate(rate)


def in_bursts(rate: float, seconds: float, seed: int = 1) -> Iterator[float]:
    """Yield the times of requests of which _BURST arrive together."""
    source = random.Random(seed)
    between_s = _BURST / rate
    at_s = 0.0
    while at_s < seconds:
        yield from [at_s] * _BURST
        at_s += between_s * source.uniform(0.8, 1.2)


# How the requests of A arrive: functions of their rate and of the seconds.
ARRIVALS: Final[Mapping[str, Callable[[float, float], Iterator[float]]]] = {
    "in bursts": in_bursts,
    "at random": at_random,
}


def jain_index(values: Sequence[float]) -> float:
    """Return Jain's fairness index."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def run_load(load: Load, begin_s: float) -> list[RequestRecord]:
    """Run a load in this process, from a time since the epoch on.

    Return the records of the requests that have ended in time, in seconds of the load.
    """
    ended: list[RequestRecord] = []

    async def run() -> None:
        await asyncio.sleep(begin_s - time.time())
        client = Client(load, ended.append)
        with suppress(TimeoutError):
            async with asyncio.timeout(load.seconds + _END_S):
                await client.run()
        client.aclose()

    clock_s = time.perf_counter() - time.time() + begin_s
    asyncio.run(run())
    for record in ended:
        record.planned_s -= clock_s
        if record.first_s is not None:
            record.first_s -= clock_s
    return ended


class Bench:
    """Runs loads of several keys against one deployment.

    Args:
        url: of the frontend.
        model: the name of the model.
        keys: by name; empty: clients need none.
        counted_s: seconds for which requests are sent and counted.
    """

    def __init__(self, url: str, model: str, keys: Mapping[str, str], counted_s: float) -> None:
        seconds = _SETTLE_S + counted_s
        self._load = Load(
            url=url, model=model, isl=_WORDS, osl=_OSL, timeout_s=_TIMEOUT_S, seconds=seconds
        )
        self._counted_s = counted_s
        self._keys = keys
        self.seconds = seconds

    def run(self, arrivals: Mapping[str, Sequence[float]]) -> dict[str, list[RequestRecord]]:
        """Send requests of several keys at once. Return the records by name of the key.

        Each key has a process of its own, so that the requests of one do not delay others here.

        Args:
            arrivals: times of the requests by name of the key, in seconds.
        """
        begin_s = time.time() + _BEGIN_S
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(arrivals), mp_context=context) as pool:
            running = {
                name: pool.submit(run_load, self._of(name, at_s), begin_s)
                for name, at_s in arrivals.items()
            }
            return {name: task.result() for name, task in running.items()}

    def _of(self, name: str, arrivals_s: Sequence[float]) -> Load:
        return replace(
            self._load,
            api_key=self._keys.get(name, ""),
            arrivals_s=tuple(arrivals_s),
            requests=len(arrivals_s),
        )

    def row(self, records: Sequence[RequestRecord], arrivals_s: Sequence[float]) -> dict[str, Any]:
        """Return the results of one key."""
        until_s = _SETTLE_S + self._counted_s
        ok = [record for record in records if record.is_ok and record.first_s is not None]
        waits_ms = sorted(
            1000 * (record.first_s - record.planned_s)
            for record in ok
            if record.first_s is not None and record.planned_s >= _SETTLE_S
        )
        served = [record for record in ok if _SETTLE_S <= (record.first_s or 0.0) < until_s]
        tokens = sum(record.prompt_tokens + record.output_tokens for record in served)
        return {
            "sent": sum(at_s >= _SETTLE_S for at_s in arrivals_s),
            "ok": len(waits_ms),
            "tok_s": tokens / self._counted_s,
            "p50": waits_ms[len(waits_ms) // 2] if waits_ms else math.nan,
            "p99": waits_ms[int(0.99 * (len(waits_ms) - 1))] if waits_ms else math.nan,
        }


def measure(bench: Bench, name: str, capacity: float) -> Iterator[dict[str, Any]]:
    """Run the loads of A alone and with B. Yield a row for each key of each.

    Args:
        bench: runs them.
        name: one of ARRIVALS, for A.
        capacity: requests per second that the prefill worker can compute.
    """
    half = capacity / 2
    flood = list(at_random(10 * half, bench.seconds, seed=2))
    own = list(ARRIVALS[name](_A_PART * half, bench.seconds))
    alone = bench.row(bench.run({"a": own})["a"], own)
    yield {"key": f"A {name}, alone", **alone}
    records = bench.run({"a": own, "b": flood})
    with_b = bench.row(records["a"], own)
    growth_ms = with_b["p99"] - alone["p99"]
    if math.isnan(growth_ms):
        growth = "none had its first token in time"
    else:
        growth = f"{100 * growth_ms / alone['p99']:+.1f}% ({growth_ms:+.0f} ms)"
    yield {"key": f"A {name}, with B", **with_b, "growth": growth}
    yield {"key": f"B with A {name}", **bench.row(records["b"], flood)}


def measure_equal(bench: Bench) -> Iterator[dict[str, Any]]:
    """Run the load of the equal keys. Yield a row for each."""
    share = _CAPACITY / len(_EQUAL_KEYS)
    equal = {
        name: list(at_random(excess * share, bench.seconds, seed))
        for seed, (name, excess) in enumerate(zip(_EQUAL_KEYS, _EXCESS, strict=True))
    }
    records = bench.run(equal)
    rows = {name: bench.row(records[name], equal[name]) for name in _EQUAL_KEYS}
    for name, excess in zip(_EQUAL_KEYS, _EXCESS, strict=True):
        yield {"key": f"one of four, {excess:g} times its share", **rows[name]}
    index = jain_index([row["tok_s"] for row in rows.values()])
    yield {"key": "Jain's index of the four", "index": index}


def measured_capacity(bench: Bench, counted_s: float) -> float:
    """Return how many requests per second are served while more wait."""
    flood = [number / _FLOOD_RATE for number in range(int(_FLOOD_RATE * bench.seconds))]
    records = bench.run({"b": flood})["b"]
    until_s = _SETTLE_S + counted_s
    served = [record for record in records if _SETTLE_S <= (record.first_s or 0.0) < until_s]
    return len(served) / counted_s


def rows_of_ours(counted_s: float) -> Iterator[dict[str, Any]]:
    """Run all loads on this project. Yield a row for each key of each."""
    keys = {name: new_key() for name in ("a", "b", *_EQUAL_KEYS)}
    keys_file = Path(f"api-keys-{os.getpid()}.jsonl")
    for name, key in keys.items():
        add_key(keys_file, ApiKey(name=name, sha256=digest_of(key).hex(), scope="all"))
    deployment = Deployment(keys_file)
    try:
        deployment.start()
        bench = Bench(deployment.url, "mock", keys, counted_s)
        bench.run({"a": _WARM_UP_S})
        for name in ARRIVALS:
            yield from measure(bench, name, _CAPACITY)
        yield from measure_equal(bench)
    finally:
        deployment.stop()
        keys_file.unlink()


def rows_of_dynamo(folder: Path, counted_s: float) -> Iterator[dict[str, Any]]:
    """Run the loads of A and B on Dynamo. Yield a row for each of them."""
    dynamo.install(folder)
    with _dynamo(folder, counted_s) as bench:
        capacity = measured_capacity(bench, counted_s)
    yield {"key": "Dynamo, requests per second at most", "number": capacity}
    for name in ARRIVALS:
        with _dynamo(folder, counted_s) as bench:
            for row in measure(bench, name, capacity):
                yield row | {"key": f"Dynamo: {row['key']}"}


@contextmanager
def _dynamo(folder: Path, counted_s: float) -> Iterator[Bench]:
    """Start Dynamo for one measurement.

    After a flood, its worker still computes requests whose clients have left: they would delay
    those of the next load.
    """
    with Stack(PacedDynamo(folder, "fastokens"), free_ports(), Engines(STEP_S)) as stack:
        bench = Bench(stack.url, MODEL, {}, counted_s)
        bench.run({"a": _WARM_UP_S})
        yield bench


def _line(row: Mapping[str, Any]) -> str:
    cells: list[str] = []
    for name, value in row.items():
        if name in ("index", "number"):
            cells.append(f"{name} {value:.3f}")
        elif isinstance(value, int | float):
            cells.append(f"{name} -" if math.isnan(value) else f"{name} {value:.0f}")
    return "  ".join([f"{row['key']:<36}", *cells, row.get("growth", "")]).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.fairness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of each of five loads (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line per row")
    parser.add_argument(
        "--beside-dynamo", action="store_true", help="measure NVIDIA Dynamo's frontend as well"
    )
    parser.add_argument(
        "--dynamo-folder",
        type=Path,
        default=dynamo.default_folder(),
        help="folder to install Dynamo into",
    )
    args = parser.parse_args()
    rows = rows_of_ours(args.seconds)
    if args.beside_dynamo:
        rows = chain(rows, rows_of_dynamo(args.dynamo_folder, args.seconds))
    for row in rows:
        sys.stdout.write((orjson.dumps(row).decode() if args.json else _line(row)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
