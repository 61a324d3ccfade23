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

from dynamo_trtllm.network.addresses import free_ports
from dynamo_trtllm.subprocesses import spawn

from .chaos.scrape import fetch, total
from .client import Client, Load
from .plane import dynamo
from .plane.measure import busy_seconds
from .plane.ours import Ours
from .plane.points import Engines
from .plane.stack import MODEL, Stack
from .routing_processes import REUSED_FILE
from .routing_trace import BLOCK_TOKENS, TraceRequest, oracle_hits, read_trace, synthetic_trace
from .stream import RequestRecord
from .summary import ProcessMeter

STEP_S: Final = 0.02
_DECODE_STEP_S = 0.01
_DECODE_BLOCKS = 1 << 17
_SALTED = 10  # prompts that are sent again with another salt each
_SETTLE_S = 3.0  # for the frontends to see all workers
_READY_S = 60.0  # longest start of the second frontend
_AGREE_S = 60.0  # longest time until the frontends agree
_STABLE_S = 1.5
_POLL_S = 0.02
_DYNAMO = "dynamo-"  # begins the modes of Dynamo's router


class RoutedWorkers(Ours):
    """This project with a router mode, and workers of these roles that cache prompts and publish KV
    events.
    """

    def __init__(
        self, mode: str, arguments: argparse.Namespace, roles: Sequence[str] = ("prefill",)
    ) -> None:
        super().__init__(uses_mock=True)
        self._roles = roles
        self.name = self._mode = mode
        self._prefill_tokens, self._blocks = arguments.prefill_tokens, arguments.cache_blocks
        self._worker_module = f"{__package__}.routing_processes"
        self._folder = tempfile.TemporaryDirectory(prefix="replay-")

    def env(self, etcd: str, nats: str) -> Mapping[str, str]:
        self.environment = {**super().env(etcd, nats), REUSED_FILE: str(self._reused)}
        return self.environment

    @property
    def _reused(self) -> Path:
        return Path(self._folder.name) / "reused"

    def reused(self) -> Counter[tuple[int, int]]:
        """Return the tokens of each prompt and those of it that the engines found in their caches,
        until now.
        """
        pairs = (
            map(int, line.split()) for line in self._reused.read_text(encoding="ascii").splitlines()
        )
        return Counter((prompt, cached) for prompt, cached in pairs)

    def frontend(self, port: int) -> Sequence[str]:
        return (*super().frontend(port), "--router-mode", self._mode)

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        engine: dict[str, object] = {"kv_block_size": BLOCK_TOKENS}
        flags = ("--publish-kv-events",) if role in self._roles else ()
        engine["enable_prefix_caching"] = role in self._roles
        if role == "prefill":
            engine |= {"step_s": STEP_S, "prefill_tokens_per_step": self._prefill_tokens}
            engine["kv_cache_blocks"] = self._blocks
        else:
            engine |= {"step_s": _DECODE_STEP_S, "kv_cache_blocks": _DECODE_BLOCKS}
        option, module, *words, arguments = super().worker(role, pace_s)
        arguments = orjson.dumps(orjson.loads(arguments) | engine).decode()
        return (option, module, "worker", *words, arguments, *flags)


class RoutedDynamo(dynamo.Dynamo):
    """Dynamo with a router mode.

    Its mock engine gets the same times: each step takes as long, and has as many tokens.

    A decode worker of Dynamo makes the first token again, and so it comes a decode step later.
    """

    def __init__(self, mode: str, arguments: argparse.Namespace) -> None:
        super().__init__(arguments.dynamo_folder, "fastokens")
        self.name = mode
        self._mode = mode.removeprefix(_DYNAMO)
        self._prefill_tokens, self._blocks = arguments.prefill_tokens, arguments.cache_blocks
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

    def frontend(self, port: int) -> Sequence[str]:
        words = list(super().frontend(port))
        words[words.index("--router-mode") + 1] = self._mode
        return words

    def worker(self, role: str, pace_s: float) -> Sequence[str]:
        words = list(super().worker(role, pace_s))
        values = {"--speedup-ratio": "1", "--max-num-batched-tokens": str(self._prefill_tokens)}
        values["--num-gpu-blocks-override"] = str(self._blocks)
        if role != "prefill":
            values |= {
                "--max-num-batched-tokens": "1000000",
                "--num-gpu-blocks-override": str(_DECODE_BLOCKS),
            }
        for name, value in values.items():
            words[words.index(name) + 1] = value
        return (
            *words,
            "--block-size",
            str(BLOCK_TOKENS),
            "--planner-profile-data",
            str(self._times),
        )


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
        " each\nHits are compared with those of an oracle that knows each cache, and of one cache"
        f" as large as all.\n{'mode':<20}   ok failed  hits %  of oracle  of one cache  busy % "
        " TTFT ms p50      p90      p99   worst",
        flush=True,
    )
    for _ in range(arguments.rounds):
        for mode in arguments.modes:
            _replay(mode, trace, arguments)


def _replay(mode: str, trace: Sequence[TraceRequest], arguments: argparse.Namespace) -> None:
    recipe = (RoutedDynamo if mode.startswith(_DYNAMO) else RoutedWorkers)(mode, arguments)
    with Stack(recipe, free_ports(), Engines(STEP_S, arguments.workers)) as stack:
        time.sleep(_SETTLE_S)
        meter, busy_s, begun_s = (
            ProcessMeter({"own": os.getpid()}),
            busy_seconds(),
            time.monotonic(),
        )
        meter.start()
        records = uvloop.run(_run(_load(stack.url, trace), recipe))
        wall_s = time.monotonic() - begun_s
        own = meter.costs(wall_s=wall_s, tokens=0, requests=0)["own"]["cores"]
        cores = own, max(0.0, (busy_seconds() - busy_s) / wall_s - own)
    good = [each for each in records if each.is_ok]
    _print_row(mode, good, len(records) - len(good), trace, arguments)
    print(
        f"{'':<20} CPU cores: {cores[0]:.2f}, used by other processes: {cores[1]:.2f}", flush=True
    )
    if arguments.records is not None:
        with arguments.records.open("ab") as file:
            for each in records:
                row = {
                    "mode": mode,
                    "index": each.index,
                    "error": each.error,
                    "cached_tokens": each.cached_tokens,
                }
                row |= {
                    "prompt_tokens": each.prompt_tokens,
                    "ttft_s": (each.first_s or 0.0) - each.planned_s,
                }
                file.write(orjson.dumps(row | {"at_s": trace[each.index - 1].at_s}) + b"\n")


def _load(url: str, trace: Sequence[TraceRequest]) -> Load:
    return Load(
        url=url,
        model=MODEL,
        requests=len(trace),
        seconds=3600.0,
        prompts=tuple(each.prompt() for each in trace),
        arrivals_s=tuple(each.at_s - trace[0].at_s for each in trace),
        osls=tuple(each.output_tokens for each in trace),
    )


async def _run(load: Load, recipe: RoutedWorkers | RoutedDynamo) -> list[RequestRecord]:
    """Run the load.

    Then compare the cached tokens of the answers with those of the engines, and try other salts.
    """
    if not isinstance(recipe, RoutedWorkers):
        return await Client(load).run()
    before = recipe.reused()
    records = await Client(load).run()
    answered = Counter((each.prompt_tokens, each.cached_tokens) for each in records if each.is_ok)
    differ = (answered - (recipe.reused() - before)).total()
    salted = replace(load, requests=1, arrivals_s=(0.0,))
    others = [
        await Client(
            replace(salted, prompts=(prompt,), extra={"cache_salt": f"tenant-{number}"})
        ).run()
        for number, prompt in enumerate(load.prompts[-_SALTED:])
    ]
    found = sum(record.cached_tokens for run in others for record in run)
    if differ or found or not all(record.is_ok for run in others for record in run):
        raise SystemExit(
            f"{differ} answers differ from the engines' counts; {found} tokens were found with new"
            " salts"
        )
    return records


def _print_row(
    mode: str,
    good: Sequence[RequestRecord],
    failed: int,
    trace: Sequence[TraceRequest],
    arguments: argparse.Namespace,
) -> None:
    prompt_tokens = {each.index: each.prompt_tokens for each in good}
    framing_tokens = min(
        (
            tokens - BLOCK_TOKENS * len(trace[index - 1].blocks)
            for index, tokens in prompt_tokens.items()
        ),
        default=0,
    )
    hits, sent = sum(each.cached_tokens for each in good), sum(prompt_tokens.values())
    shares = (
        hits / max(1, oracle_hits(trace, framing_tokens, blocks, workers))
        for blocks, workers in (
            (arguments.cache_blocks, arguments.workers),
            (arguments.cache_blocks * arguments.workers, 1),
        )
    )
    capacity = arguments.workers * arguments.prefill_tokens / STEP_S * trace[-1].at_s
    ttfts = sorted(each.first_s - each.planned_s for each in good if each.first_s is not None) or [
        0.0
    ]
    p50, p90, p99 = (1e3 * ttfts[len(ttfts) * share // 100] for share in (50, 90, 99))
    found = "{:7.1f} {:10.3f} {:13.3f} {:7.0f}".format(
        100 * hits / max(1, sent), *shares, 100 * (sent - hits) / capacity
    )
    # its answers have the count of the decode worker, which computes no prompt
    if mode.startswith(_DYNAMO):
        found = f"{'-':>7} {'-':>10} {'-':>13} {'-':>7}"
    print(
        f"{mode:<20} {len(good):4} {failed:6} {found} {p50:12.0f} {p90:8.0f} {p99:8.0f}"
        f" {1e3 * ttfts[-1]:7.0f}",
        flush=True,
    )


def measure_indexes(arguments: argparse.Namespace) -> None:
    """Print a row per burst of requests, which come through two frontends.

    The second one loses updates.
    """
    trace = synthetic_trace(arguments.requests, arguments.rate)
    recipe, port = RoutedWorkers("kv", arguments, ("prefill", "decode")), free_ports()
    with Stack(recipe, free_ports(), Engines(STEP_S, arguments.workers)) as stack:
        env = {
            name: value for name, value in os.environ.items() if not name.startswith("DYN_")
        } | recipe.environment
        module = ("-m", f"{__package__}.routing_processes", "frontend")
        second = spawn(
            [recipe.python, *module, *recipe.frontend(port)[2:]],
            env=env,
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
                begin, end = (
                    len(trace) * each // arguments.bursts for each in (number, number + 1)
                )
                halves = (trace[begin:end:2], trace[begin + 1 : end : 2])
                loads = [_load(url, half) for url, half in zip(urls, halves, strict=True)]
                uvloop.run(_run_all(loads))
                agreed_s = _until_equal(urls, _AGREE_S)
                blocks = [sum(_known_blocks(url).values()) for url in urls]
                lost, asked = (
                    total(urls[1], "kv_updates", f'outcome="{each}"') for each in ("gap", "resync")
                )
                print(
                    f"{number:5} {blocks[0]:20} {blocks[1]:7} {lost:13.0f} {asked:20.0f}"
                    f" {1e3 * agreed_s:15.0f}",
                    flush=True,
                )
        finally:
            second.terminate()
            second.wait()


async def _run_all(loads: Sequence[Load]) -> None:
    await asyncio.gather(*(Client(load).run() for load in loads))


def _known_blocks(url: str) -> dict[str, int]:
    """Return the blocks that a frontend knows, by worker."""
    try:
        found = re.findall(
            r'known_prefix_blocks{worker="(\w+)"} (\S+)', fetch(f"{url}/metrics").decode()
        )
    except OSError:
        return {}
    return {worker: int(float(blocks)) for worker, blocks in found}


def _until_equal(urls: Sequence[str], limit_s: float) -> float:
    """Wait until frontends know equally many blocks of each worker, and for _STABLE_S more.

    Return how long it took.
    """
    begun_s = unequal_s = time.monotonic()
    while (now := time.monotonic()) - unequal_s < _STABLE_S:
        first, second = map(_known_blocks, urls)
        if first != second or not first:
            unequal_s = now = time.monotonic()
        if now - begun_s > limit_s:
            raise SystemExit(
                f"after {limit_s:g} s the frontends know different blocks: {first}, {second}"
            )
        time.sleep(_POLL_S)
    return unequal_s - begun_s
