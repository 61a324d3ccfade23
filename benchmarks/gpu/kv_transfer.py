"""Measures KV transfers between two GPUs through the transfer backend, beside torch's peer copy.

A source process has GPU 0 and a reader process GPU 1. Transfers contiguous memory, and KV of
gpt-oss-120b's shape between scattered block lists, including the copies out of and into the blocks.
"in flight": 64 transfers at once (KV: four at once, or as many as fit), beside 64 queued peer
copies. "alone": one at a time. Checks the received bytes.

python -m benchmarks.gpu.kv_transfer [--device cuda|cpu] [--kv-checksums auto|on|off] \\
  [--only-bytes] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from dynamo_trtllm.engines.torch.transfer_buffer import REGION_BYTES
from dynamo_trtllm.kv_transfer.checksums import KV_CHECKSUMS, ChecksumMode

from . import result
from .kv_transfer_ends import (
    KvReader,
    Plan,
    Prompt,
    Times,
    TransferEnd,
    device_of,
    run_as_worker,
    run_source,
)

MIB = 1 << 20
SIZES = {
    "cuda": [MIB // 16, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB, 4096 * MIB],
    "cpu": [MIB // 16, MIB, 64 * MIB],
}
TOKENS = {"cuda": [1 << n for n in range(10, 18)], "cpu": [256, 512]}
PIECES = {"cuda": [16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB], "cpu": [MIB, 4 * MIB]}
STAGING_BYTES = {"cuda": 8192 * MIB, "cpu": 64 * MIB}
TOKENS_OF_PIECES = {"cuda": 8192, "cpu": 512}  # prompt length for the comparison of piece sizes
QUEUED = 64  # copies or transfers at once
ALONE = 10  # repetitions of one at a time
GPUS = 2
AT_ONCE = 4  # prompts
REPEATS = {"cuda": 9, "cpu": 3}


def peer_copy(kind: str, num_bytes: int) -> dict[str, float]:
    """Return the seconds of one peer copy, when many are queued and alone."""
    devices = [device_of(kind, number) for number in (0, 1)]
    source, target = (
        torch.empty(num_bytes, dtype=torch.uint8, device=device) for device in devices
    )

    def copies(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        for device in devices:
            if kind == "cuda":
                torch.cuda.synchronize(device)
        return (time.perf_counter() - begun) / count

    copies(3)
    queued = statistics.median(copies(QUEUED) for _ in range(3))
    return {"queued_s": queued, "alone_s": statistics.median(copies(1) for _ in range(ALONE))}


async def contiguous(reader: KvReader, num_bytes: int) -> dict[str, float]:
    """Return the seconds of one fetch, when many are in flight and alone.

    The offers exist before the clock starts.
    """
    await reader.bytes(await reader.offers(num_bytes, 2), num_bytes)
    queued = [
        await reader.bytes(await reader.offers(num_bytes, QUEUED), num_bytes) / QUEUED
        for _ in range(3)
    ]
    alone = [
        await reader.bytes([offer], num_bytes) for offer in await reader.offers(num_bytes, ALONE)
    ]
    return {"queued_s": statistics.median(queued), "alone_s": statistics.median(alone)}


async def blocks(reader: KvReader, prompt: Prompt, repeats: int) -> dict[str, Any]:
    """Measure the KV transfer of a prompt: alone, by phase, and several at once."""
    rows = reader.end.rows(prompt.tokens)
    num_bytes = reader.end.pool.moved_bytes(prompt.tokens)
    await reader.check(prompt, rows)
    alone = [await reader.prompt(prompt, rows) for _ in range(repeats)]
    _, (gather_s, scatter_s) = await reader.ask("copies", prompt)
    measured = {
        "bytes": num_bytes,
        "alone_s": statistics.median(times.all_s for times in alone),
        "gather_alone_s": gather_s,
        "scatter_alone_s": scatter_s,
        "phases_s": _phases(alone),
    }
    at_once = min(AT_ONCE, reader.end.transfer_buffer.num_bytes // (num_bytes + MIB) - 1)
    if at_once > 1:
        measured |= {
            "at_once": at_once,
            "queued_s": await _many(reader, prompt, at_once, at_once * repeats),
        }
    return measured


def _phases(alone: list[Times]) -> dict[str, float]:
    phases: dict[str, Callable[[Times], float]] = {
        "gather queued, offer made": lambda times: times.offered - times.began,
        "offer sent": lambda times: times.arrived - times.offered,
        "read, copies queued": lambda times: times.fetched - times.arrived,
        "last copies": lambda times: times.ended - times.fetched,
    }
    return {name: statistics.median(map(phase, alone)) for name, phase in phases.items()}


async def _many(reader: KvReader, prompt: Prompt, at_once: int, count: int) -> float:
    """Return the seconds per prompt with `at_once` transfers in flight."""
    rows = reader.end.rows(prompt.tokens)
    slots = asyncio.Semaphore(at_once)

    async def one() -> Times:
        async with slots:
            return await reader.prompt(prompt, rows)

    times = await asyncio.gather(*(one() for _ in range(count)))
    return (max(time.ended for time in times) - min(time.began for time in times)) / count


async def measure(plan: Plan, connection: Any) -> dict[str, Any]:
    """Measure all transfers through the transfer backend.

    `connection` leads to the source process.
    """
    reader = KvReader(TransferEnd(plan, 1), connection)
    try:
        await reader.start()
        return await _measure(reader, plan)
    finally:
        await reader.stop()


async def _measure(reader: KvReader, plan: Plan) -> dict[str, Any]:
    kind = plan.device
    if plan.only_bytes:
        return {"contiguous": {size: await contiguous(reader, size) for size in SIZES[kind]}}
    default = REGION_BYTES[kind]
    compared = TOKENS_OF_PIECES[kind]
    repeats = REPEATS[kind]
    return {
        "contiguous": {size: await contiguous(reader, size) for size in SIZES[kind]},
        "kv": {
            tokens: await blocks(reader, Prompt(tokens, default), repeats)
            for tokens in TOKENS[kind]
        },
        "pieces": {
            size: await blocks(reader, Prompt(compared, size), repeats) for size in PIECES[kind]
        },
        "kernels": await reader.end.kernels(compared),
        "gathered whole": await blocks(reader, Prompt(compared, default, whole=True), repeats),
    }


def run(
    kind: str, kv_checksums: ChecksumMode = "auto", *, only_bytes: bool = False
) -> dict[str, Any]:
    plan = Plan(kind, TOKENS[kind][-1], STAGING_BYTES[kind], kv_checksums, only_bytes)
    spawning = multiprocessing.get_context("spawn")
    reader_end, source_end = spawning.Pipe()
    source = spawning.Process(target=run_source, args=(plan, source_end), daemon=True)
    source.start()
    source_end.close()  # so that the reader gets EOF when the source ends
    measured = run_as_worker(measure(plan, reader_end))
    source.join(30)
    if kind == "cuda":
        torch.cuda.empty_cache()
    sizes = {*SIZES[kind], *(row["bytes"] for row in measured.get("kv", {}).values())}
    measured["peer copy"] = {size: peer_copy(kind, size) for size in sorted(sizes)}
    return measured


def bars(measured: dict[str, Any]) -> list[result.Row]:
    """Return the targets and the measured values."""
    peer = measured["peer copy"]
    rows = []
    for size, wanted in ((64 * MIB, 0.97), (1024 * MIB, 0.99)):
        if row := measured["contiguous"].get(size):
            rows.append(
                _share(f"{_size(size)} in one piece, of peer copy", row, peer[size], wanted)
            )
    prompts = {
        tokens: row for tokens, row in measured.get("kv", {}).items() if tokens in (8192, 32768)
    }
    rows += [
        _share(f"KV of {tokens} tokens, of peer copy", row, peer[row["bytes"]], 0.80)
        for tokens, row in prompts.items()
    ]
    if row := measured.get("kv", {}).get(8192):
        took_ms = 1e3 * row["alone_s"]
        rows.append(
            result.Row(
                what="KV of 8192 tokens, alone",
                value=f"{took_ms:.2f} ms",
                bar="<= 1.5 ms",
                met=took_ms <= 1.5,
            )
        )
    return rows


def _share(what: str, row: dict[str, float], peer: dict[str, float], wanted: float) -> result.Row:
    reached = peer["queued_s"] / row["queued_s"]
    alone = peer["alone_s"] / row["alone_s"]
    value = f"{reached:.3f} in flight, {alone:.3f} alone"
    return result.Row(what=what, value=value, bar=f">= {wanted:g} in flight", met=reached >= wanted)


def show(measured: dict[str, Any]) -> None:
    """Print the results."""
    peer = measured["peer copy"]
    print(
        f"\n{'':>16} {'peer copy':>18} {'in flight':>18} {'ratio':>6} {'alone us':>9}"
        f" {'peer us':>9}"
    )
    rows = [(_size(size), size, row) for size, row in measured["contiguous"].items()]
    rows += [
        (f"{tokens} tokens", row["bytes"], row) for tokens, row in measured.get("kv", {}).items()
    ]
    for name, size, row in rows:
        queued = row.get("queued_s", row["alone_s"])
        theirs = peer[size]
        print(
            f"{name:>16} {size / theirs['queued_s'] / 1e9:13.1f} GB/s {size / queued / 1e9:13.1f}"
            f" GB/s {theirs['queued_s'] / queued:6.2f} {1e6 * row['alone_s']:9.0f}"
            f" {1e6 * theirs['alone_s']:9.0f}"
        )
    if "kv" in measured:
        _show_prompts(measured)
    for row in bars(measured):
        print(f"{row.what}: {row.value}, target {row.bar}: {'met' if row.met else 'NOT MET'}")


def _show_prompts(measured: dict[str, Any]) -> None:
    print(
        "\nOne prompt alone: GB/s of the copies out of and into blocks, microseconds of each phase"
    )
    kinds = [(f"{tokens} tokens", row) for tokens, row in measured["kv"].items()]
    kinds += [(f"pieces {_size(size)}", row) for size, row in measured["pieces"].items()]
    kinds += [("gathered whole", measured["gathered whole"])]
    for name, row in kinds:
        phases = ", ".join(f"{phase} {1e6 * took:.0f}" for phase, took in row["phases_s"].items())
        gather, scatter = (
            row["bytes"] / row[key] / 1e9 for key in ("gather_alone_s", "scatter_alone_s")
        )
        print(
            f"{name:>16} {1e6 * row['alone_s']:8.0f} us; out {gather:.0f}, in {scatter:.0f};"
            f" {phases}"
        )
    print(
        "\nCopy kernels, GB/s: "
        + ", ".join(f"{name} {speed:.0f}" for name, speed in measured["kernels"].items())
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes >> 10} KiB"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.kv_transfer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: small sizes, to test the code",
    )
    parser.add_argument(
        "--kv-checksums", choices=get_args(ChecksumMode), default="auto", help=KV_CHECKSUMS
    )
    parser.add_argument(
        "--only-bytes", action="store_true", help="measure contiguous memory only, no prompts"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the results and the setup to this JSON file"
    )
    arguments = parser.parse_args()
    begun = time.perf_counter()
    measured = run(arguments.device, arguments.kv_checksums, only_bytes=arguments.only_bytes)
    show(measured)
    print(f"took {time.perf_counter() - begun:.0f} s")
    if arguments.out is not None:
        setup = {
            "device": arguments.device,
            "gpus": GPUS,
            "kv": "gpt-oss-120b, bf16, blocks of 32 tokens",
        }
        setup["kv_checksums"] = arguments.kv_checksums
        seconds = time.perf_counter() - begun
        made = result.make_result(
            "kv_transfer", setup=setup, seconds=seconds, rows=bars(measured), detail=measured
        )
        result.write(made, arguments.out)


if __name__ == "__main__":
    main()
