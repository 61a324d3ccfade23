"""Replays a trace against mock workers behind each router, or two frontends.

Part of `benchmarks.routing`.

Prefix hits count against those of an oracle, see `routing_trace.oracle_hits`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL
from typing import Final

import numpy as np
import orjson
import uvloop

from dynamo_trtllm.support.network.addresses import free_ports
from dynamo_trtllm.support.subprocesses import spawn

from .load_client import Client, Load
from .plane import dynamo
from .plane.measure import busy_seconds
from .plane.ours import Ours
from .plane.points import Engines
from .plane.stack import MODEL, Stack
from .routing_processes import REUSED_FILE
from .routing_trace import BLOCK_TOKENS, TraceRequest, oracle_hits, read_trace, synthetic_trace
from .scrape import fetch, total
from .stream import RequestRecord
from .summary import ProcessMeter

STEP_S: Final = 0.02
_DECODE_STEP_S = 0.01
_DECODE_BLOCKS = 1 << 17
_DECODE_STEP_TOKENS = 1_000_000
_SALTED = 10  # prompts that are sent again with another salt each
_SETTLE_S = 3.0  # for the frontends to see all workers
_READY_S = 60.0  # longest start of the second frontend
_AGREE_S = 60.0  # longest time until the frontends agree
_STABLE_S = 1.5
_POLL_S = 0.02
_DYNAMO = "dynamo-"  # begins the modes of Dynamo's router


class RoutedWorkers(Ours):
    """This project with a router mode.

    Its workers of some roles cache prompts and publish KV events.
    """

    def __init__(
        self, mode: str, arguments: argparse.Namespace, roles: Sequence[str] = ("prefill",)
    ) -> None:
        super().__init__(uses_mock=True)
        self.name = mode
        self._mode = mode
        self._roles = roles
        self._prefill_tokens = arguments.prefill_tokens
        self._blocks = arguments.cache_blocks
        self._worker_module = f"{__package__}.routing_processes"
        self._folder = tempfile.TemporaryDirectory(prefix="replay-")

    def env(self, etcd: str, nats: str) -> Mapping[str, str]:
        self.environment = {**super().env(etcd, nats), REUSED_FILE: str(self._reused)}
        return self.environment

    @property
    def _reused(self) -> Path:
        return Path(self._folder.name) / "reused"

    def reused(self) -> Counter[tuple[int, int]]:
        """Count the prompts until now by their tokens and those that the engines had cached."""
        counts: Counter[tuple[int, int]] = Counter()
        for line in self._reused.read_text(encoding="ascii").splitlines():
            prompt_tokens, cached_tokens = map(int, line.split())
            counts[prompt_tokens, cached_tokens] += 1
        return counts

    def frontend(self, port: int, pace_s: float) -> Sequence[str]:
        return (*super().frontend(port, pace_s), "--router-mode", self._mode)

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        caches_prompts = role in self._roles
        engine: dict[str, object] = {
            "kv_block_size": BLOCK_TOKENS,
            "enable_prefix_caching": caches_prompts,
        }
        if role == "prefill":
            engine["step_s"] = STEP_S
            engine["prefill_tokens_per_step"] = self._prefill_tokens
            engine["kv_cache_blocks"] = self._blocks
        else:
            engine["step_s"] = _DECODE_STEP_S
            engine["kv_cache_blocks"] = _DECODE_BLOCKS
        # The last word of the command has the engine's arguments.
        option, module, *words, arguments = super().worker(role, pace_s)
        arguments = orjson.dumps(orjson.loads(arguments) | engine).decode()
        command = [option, module, "worker", *words, arguments]
        if caches_prompts:
            command.append("--publish-kv-events")
        return command


class RoutedDynamo(dynamo.Dynamo):
    """Dynamo with a router mode.

    Its mock engine gets the same times: each step takes as long, and has as many tokens. A decode
    worker of Dynamo makes the first token again, and so it comes a decode step later.
    """

    def __init__(self, mode: str, arguments: argparse.Namespace) -> None:
        super().__init__(arguments.dynamo_folder, "fastokens")
        self.name = mode
        self._mode = mode.removeprefix(_DYNAMO)
        self._prefill_tokens = arguments.prefill_tokens
        self._blocks = arguments.cache_blocks
        self._times = arguments.dynamo_folder / "step_times.npz"
        steps = np.array([[_DECODE_STEP_S * 1e3] * 2] * 2)
        grid = np.array([0.0, 1e7])
        np.savez(
            self._times,
            prefill_isl=np.array([1.0, 1e6]),
            prefill_ttft_ms=np.array([STEP_S * 1e3] * 2),
            decode_active_kv_tokens=grid,
            decode_context_length=grid,
            decode_itl=steps,
        )

    def frontend(self, port: int, pace_s: float) -> Sequence[str]:
        words = list(super().frontend(port, pace_s))
        _set_option(words, "--router-mode", self._mode)
        return words

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        step_tokens = _DECODE_STEP_TOKENS
        num_blocks = _DECODE_BLOCKS
        if role == "prefill":
            step_tokens = self._prefill_tokens
            num_blocks = self._blocks
        words = list(super().worker(role, pace_s))
        _set_option(words, "--speedup-ratio", "1")
        _set_option(words, "--max-num-batched-tokens", str(step_tokens))
        _set_option(words, "--num-gpu-blocks-override", str(num_blocks))
        words += ["--block-size", str(BLOCK_TOKENS)]
        words += ["--planner-profile-data", str(self._times)]
        return words


def _set_option(words: list[str], name: str, value: str) -> None:
    """Change the value of an option that a command already has."""
    words[words.index(name) + 1] = value


def measure_replay(arguments: argparse.Namespace) -> None:
    """Print a row per run."""
    if arguments.trace is None:
        trace = synthetic_trace(arguments.requests, arguments.rate)
    else:
        trace = read_trace(arguments.trace, arguments.requests, arguments.rate)
    if any(mode.startswith(_DYNAMO) for mode in arguments.modes):
        dynamo.install(arguments.dynamo_folder)
    print(
        f"{len(trace)} requests in {trace[-1].at_s:.0f} s, {arguments.workers} prefill workers with"
        f" {arguments.prefill_tokens / STEP_S:,.0f} tokens/s and {arguments.cache_blocks} blocks"
        " each"
    )
    print(
        "Hits are compared with those of an oracle that knows each cache, and of one cache as large"
        " as all."
    )
    columns = "ok failed  hits %  of oracle  of one cache  busy %  TTFT ms p50      p90      p99"
    print(f"{'mode':<20}   {columns}   worst", flush=True)
    for _ in range(arguments.rounds):
        for mode in arguments.modes:
            _replay(mode, trace, arguments)


def _replay(mode: str, trace: Sequence[TraceRequest], arguments: argparse.Namespace) -> None:
    recipe: RoutedWorkers | RoutedDynamo
    if mode.startswith(_DYNAMO):
        recipe = RoutedDynamo(mode, arguments)
    else:
        recipe = RoutedWorkers(mode, arguments)
    with Stack(recipe, free_ports(), Engines(STEP_S, arguments.workers)) as stack:
        time.sleep(_SETTLE_S)
        meter = ProcessMeter({"own": os.getpid()})
        busy_before_s = busy_seconds()
        begun_s = time.monotonic()
        meter.start()
        records = uvloop.run(_run(_load(stack.url, trace), recipe))
        wall_s = time.monotonic() - begun_s
        own_cores = meter.costs(wall_s=wall_s, tokens=0, requests=0)["own"]["cores"]
        busy_cores = (busy_seconds() - busy_before_s) / wall_s
    other_cores = max(0.0, busy_cores - own_cores)
    good = [record for record in records if record.is_ok]
    _print_row(mode, good, len(records) - len(good), trace, arguments)
    print(
        f"{'':<20} CPU cores: {own_cores:.2f}, used by other processes: {other_cores:.2f}",
        flush=True,
    )
    if arguments.records is not None:
        _append_records(arguments.records, mode, records, trace)


def _append_records(
    path: Path, mode: str, records: Sequence[RequestRecord], trace: Sequence[TraceRequest]
) -> None:
    """Append a JSON line per request to a file."""
    with path.open("ab") as file:
        for record in records:
            row = {
                "mode": mode,
                "index": record.index,
                "error": record.error,
                "cached_tokens": record.cached_tokens,
                "prompt_tokens": record.prompt_tokens,
                "ttft_s": (record.first_s or 0.0) - record.planned_s,
                "at_s": trace[record.index - 1].at_s,
            }
            file.write(orjson.dumps(row) + b"\n")


def _load(url: str, trace: Sequence[TraceRequest]) -> Load:
    return Load(
        url=url,
        model=MODEL,
        requests=len(trace),
        seconds=3600.0,
        prompts=tuple(request.prompt() for request in trace),
        arrivals_s=tuple(request.at_s - trace[0].at_s for request in trace),
        osls=tuple(request.output_tokens for request in trace),
    )


async def _run(load: Load, recipe: RoutedWorkers | RoutedDynamo) -> list[RequestRecord]:
    """Run the load.

    Then compare the cached tokens of the answers with those of the engines, and try other salts.
    """
    if not isinstance(recipe, RoutedWorkers):
        return await Client(load).run()
    before = recipe.reused()
    records = await Client(load).run()
    answered = Counter(
        (record.prompt_tokens, record.cached_tokens) for record in records if record.is_ok
    )
    num_different = (answered - (recipe.reused() - before)).total()
    salted = await _run_salted(load)
    found_tokens = sum(record.cached_tokens for record in salted)
    if num_different or found_tokens or not all(record.is_ok for record in salted):
        raise SystemExit(
            f"{num_different} answers differ from the engines' counts; {found_tokens} tokens were"
            " found with new salts"
        )
    return records


async def _run_salted(load: Load) -> list[RequestRecord]:
    """Send the last prompts again, one after the other, each with a salt of its own."""
    records: list[RequestRecord] = []
    for number, prompt in enumerate(load.prompts[-_SALTED:]):
        salted = replace(
            load,
            requests=1,
            arrivals_s=(0.0,),
            prompts=(prompt,),
            extra={"cache_salt": f"tenant-{number}"},
        )
        records += await Client(salted).run()
    return records


def _print_row(
    mode: str,
    good: Sequence[RequestRecord],
    num_failed: int,
    trace: Sequence[TraceRequest],
    arguments: argparse.Namespace,
) -> None:
    # Answers of Dynamo have the count of the decode worker, which computes no prompt.
    if mode.startswith(_DYNAMO):
        hits = f"{'-':>7} {'-':>10} {'-':>13} {'-':>7}"
    else:
        hits = _hits(good, trace, arguments)
    ttfts_s = sorted(
        record.first_s - record.planned_s for record in good if record.first_s is not None
    )
    if not ttfts_s:
        ttfts_s = [0.0]
    p50, p90, p99 = (1e3 * ttfts_s[len(ttfts_s) * share // 100] for share in (50, 90, 99))
    worst = 1e3 * ttfts_s[-1]
    print(
        f"{mode:<20} {len(good):4} {num_failed:6} {hits} {p50:12.0f} {p90:8.0f} {p99:8.0f}"
        f" {worst:7.0f}",
        flush=True,
    )


def _hits(
    good: Sequence[RequestRecord], trace: Sequence[TraceRequest], arguments: argparse.Namespace
) -> str:
    """Return the columns of the prefix hits and of the time in which workers compute."""
    hits = sum(record.cached_tokens for record in good)
    sent = sum(record.prompt_tokens for record in good)
    # The chat template puts them before each prompt.
    framing_tokens = min(
        (
            record.prompt_tokens - BLOCK_TOKENS * len(trace[record.index - 1].blocks)
            for record in good
        ),
        default=0,
    )
    num_blocks = arguments.cache_blocks
    num_workers = arguments.workers
    of_oracle = oracle_hits(trace, framing_tokens, num_blocks, num_workers)
    of_one_cache = oracle_hits(trace, framing_tokens, num_blocks * num_workers, 1)
    capacity = num_workers * arguments.prefill_tokens / STEP_S * trace[-1].at_s
    hit_percent = 100 * hits / max(1, sent)
    busy_percent = 100 * (sent - hits) / capacity
    return (
        f"{hit_percent:7.1f} {hits / max(1, of_oracle):10.3f} {hits / max(1, of_one_cache):13.3f}"
        f" {busy_percent:7.0f}"
    )


def measure_indexes(arguments: argparse.Namespace) -> None:
    """Print a row per burst of requests, which come through two frontends.

    The second one loses updates.
    """
    trace = synthetic_trace(arguments.requests, arguments.rate)
    recipe = RoutedWorkers("kv", arguments, ("prefill", "decode"))
    port = free_ports()
    with Stack(recipe, free_ports(), Engines(STEP_S, arguments.workers)) as stack:
        env = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        module = ("-m", f"{__package__}.routing_processes", "frontend")
        second = spawn(
            [recipe.python, *module, *recipe.frontend(port, STEP_S)[2:]],
            env=env | recipe.environment,
            stdout=DEVNULL,
            stderr=DEVNULL,
        )
        urls = stack.url, f"http://127.0.0.1:{port}"
        try:
            _until_equal(urls, _READY_S)
            print(
                "burst  blocks known: first  second  updates lost  snapshots asked for  agree"
                " after ms",
                flush=True,
            )
            for number in range(arguments.bursts):
                begin = len(trace) * number // arguments.bursts
                end = len(trace) * (number + 1) // arguments.bursts
                _measure_burst(number, trace[begin:end], urls)
        finally:
            second.terminate()
            second.wait()


def _measure_burst(number: int, requests: Sequence[TraceRequest], urls: tuple[str, str]) -> None:
    """Send a burst, half of it through each frontend, and print its row."""
    first_url, second_url = urls
    loads = [_load(first_url, requests[0::2]), _load(second_url, requests[1::2])]
    uvloop.run(_run_all(loads))
    agreed_s = _until_equal(urls, _AGREE_S)
    first_blocks = sum(_known_blocks(first_url).values())
    second_blocks = sum(_known_blocks(second_url).values())
    num_lost = total(second_url, "kv_updates", 'outcome="gap"')
    num_asked = total(second_url, "kv_updates", 'outcome="resync"')
    print(
        f"{number:5} {first_blocks:20} {second_blocks:7} {num_lost:13.0f} {num_asked:20.0f}"
        f" {1e3 * agreed_s:15.0f}",
        flush=True,
    )


async def _run_all(loads: Sequence[Load]) -> None:
    await asyncio.gather(*(Client(load).run() for load in loads))


def _known_blocks(url: str) -> dict[str, int]:
    """Return the blocks that a frontend knows, by worker."""
    try:
        metrics = fetch(f"{url}/metrics").decode()
    except OSError:
        return {}
    found = re.findall(r'known_prefix_blocks{worker="(\w+)"} (\S+)', metrics)
    return {worker: int(float(blocks)) for worker, blocks in found}


def _until_equal(urls: Sequence[str], limit_s: float) -> float:
    """Wait until frontends know equally many blocks of each worker, and for _STABLE_S more.

    Return how long it took.
    """
    begun_s = time.monotonic()
    unequal_s = begun_s  # the last time at which they were not equal
    while time.monotonic() - unequal_s < _STABLE_S:
        first, second = map(_known_blocks, urls)
        if first != second or not first:
            unequal_s = time.monotonic()
        if time.monotonic() - begun_s > limit_s:
            raise SystemExit(
                f"after {limit_s:g} s the frontends know different blocks: {first}, {second}"
            )
        time.sleep(_POLL_S)
    return unequal_s - begun_s
