"""Measures whether a client that sends too much slows down others, and whether equal ones get equal
parts.

    python -m benchmarks.fairness

Starts a small deployment with the mock engine and API keys. Its prefill worker is the bottleneck: a
step of 0.1 s computes one prompt.

Two keys: A stays within its half of what the worker can compute, and B sends ten times its half.
First A runs alone, then with B. This is done with two arrivals of A: in bursts, as of a program
with many calls at once, and at random. B delays a request of A by at most two steps: the one that
runs, and the next one, which waits at the worker. How much that is in percent depends on how long
the requests of A wait for each other.

Equal keys: four keys send 1.5, 2, 5 and 10 times their share. Jain's index of the tokens that they
got is 1 if all got the same, and 0.25 if one got everything.

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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson

from dynamo_trtllm.access.api_keys import ApiKey, digest_of, new_key
from dynamo_trtllm.access.keys_file import add_key

from .deployment import NAME_VARIABLE, LaunchedDeployment, NotReady
from .load_client import Client, Load
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
_A_PART = 0.7  # of its half that A sends
_EXCESS: Final = (1.5, 2.0, 5.0, 10.0)  # times its share that each equal key sends
_EQUAL_KEYS = ("c", "d", "e", "f")
_BEGIN_S = 3.0  # until all client processes have started
_SETTLE_S = 15.0  # requests of this time are sent, and not counted
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
    random_ = random.Random(seed)
    at_s = random_.expovariate(rate)
    while at_s < seconds:
        yield at_s
        at_s += random_.expovariate(rate)


def in_bursts(rate: float, seconds: float, seed: int = 1) -> Iterator[float]:
    """Yield the times of requests of which _BURST arrive together."""
    random_ = random.Random(seed)
    between_s = _BURST / rate
    at_s = 0.0
    while at_s < seconds:
        yield from [at_s] * _BURST
        at_s += between_s * random_.uniform(0.8, 1.2)


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
        keys: by name.
        counted_s: seconds for which requests are sent and counted.
    """

    def __init__(self, url: str, keys: Mapping[str, str], counted_s: float) -> None:
        seconds = _SETTLE_S + counted_s
        self._load = Load(
            url=url, model="mock", isl=_WORDS, osl=_OSL, timeout_s=_TIMEOUT_S, seconds=seconds
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
            return {name: each.result() for name, each in running.items()}

    def _of(self, name: str, arrivals_s: Sequence[float]) -> Load:
        return replace(
            self._load,
            api_key=self._keys[name],
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


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """Run all loads. Yield a row for each key of each."""
    half = _CAPACITY / 2
    bench.run({"a": [0.2 * number for number in range(20)]})  # a warm-up
    flood = list(at_random(10 * half, bench.seconds, seed=2))
    for name, arrivals in (("in bursts", in_bursts), ("at random", at_random)):
        own = list(arrivals(_A_PART * half, bench.seconds))
        alone = bench.row(bench.run({"a": own})["a"], own)
        yield {"key": f"A {name}, alone", **alone}
        records = bench.run({"a": own, "b": flood})
        with_b = bench.row(records["a"], own)
        growth_ms = with_b["p99"] - alone["p99"]
        growth = f"{100 * growth_ms / alone['p99']:+.1f}% ({growth_ms:+.0f} ms)"
        yield {"key": f"A {name}, with B", **with_b, "growth": growth}
        yield {"key": f"B with A {name}", **bench.row(records["b"], flood)}
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


def _line(row: Mapping[str, Any]) -> str:
    cells: list[str] = []
    for name, value in row.items():
        if name == "index":
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
    args = parser.parse_args()
    keys = {name: new_key() for name in ("a", "b", *_EQUAL_KEYS)}
    keys_file = Path(f"api-keys-{os.getpid()}.jsonl")
    for name, key in keys.items():
        add_key(keys_file, ApiKey(name=name, sha256=digest_of(key).hex(), scope="all"))
    deployment = Deployment(keys_file)
    try:
        deployment.start()
        for row in measure(Bench(deployment.url, keys, args.seconds)):
            sys.stdout.write((orjson.dumps(row).decode() if args.json else _line(row)) + "\n")
            sys.stdout.flush()
    finally:
        deployment.stop()
        keys_file.unlink()


if __name__ == "__main__":
    main()
