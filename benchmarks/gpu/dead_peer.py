"""Measures which UCX settings release the GPU memory of a killed prefill process while its reader
stays alive.

    python -m benchmarks.gpu.dead_peer --variants default,no-cache --out FILE

Two processes stand for prefill workers and one for a decode worker, all on one GPU, with NIXL as
vLLM's connector uses it. The decode process reads the first one's memory, so that UCX maps it over
CUDA IPC. Then the first one is killed (SIGKILL), and a further process watches the GPU's free
memory after each step of the decode process. Afterwards the decode process reads from the second
prefill process. A variant is a set of UCX variables, or a kill during reads. Each also measures the
speed of reads, and how far reads delay the decode process's own kernels.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from . import machine
from .dead_peer_ends import MIB, REGIONS, UNREGISTERED_MIB, decode, prefill, watch

_ANSWER_S = 40.0
_POLL_S = 2.0
_SLACK_MIB = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the processes."""

    env: dict[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ("nothing", "forget")  # of the decode process, after the kill
    is_killed_reading: bool = False


VARIANTS = {
    "default": Variant(steps=("nothing", "forget", "close")),
    "no-cache": Variant(env={"UCX_CUDA_IPC_CACHE": "n"}),
    "no-cache-reading": Variant(env={"UCX_CUDA_IPC_CACHE": "n"}, is_killed_reading=True),
    "purge": Variant(steps=("nothing", "purge", "forget")),
    "small-cache": Variant(env={"UCX_CUDA_IPC_CACHE_MAX_REGIONS": "1"}),
    "default-reading": Variant(is_killed_reading=True, steps=("nothing", "forget", "purge")),
    "no-cuda-ipc": Variant(env={"UCX_TLS": "cuda_copy,sm,tcp,self"}),
}


# --- a variant ------------------------------------------------------------------------------------


class Peer:
    """A process and the pipe to it."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        """Return the next message. Raise RuntimeError if none comes."""
        try:
            if self.pipe.poll(_ANSWER_S):
                return self.pipe.recv()
        except EOFError:
            self.process.join(5)
            raise RuntimeError(f"the process ended with {self.process.exitcode}") from None
        raise RuntimeError(f"the process was silent for {_ANSWER_S:g} s")

    def call(self, *message: Any) -> Any:
        """Send a message and return the answer."""
        self.pipe.send(message)
        return self.answer()

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()


class Trial:
    """One variant."""

    def __init__(
        self, name: str, watcher: Peer, device: str, region_bytes: int, logs: Path | None
    ) -> None:
        self._variant = VARIANTS[name]
        self._watcher = watcher
        self._device = device
        self._region_bytes = region_bytes
        self.result: dict[str, Any] = {"variant": name, "env": self._variant.env}
        # UCX would choose other reads on a GPU without an active NVLink, as on a machine with one
        # GPU.
        self._environ = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", **self._variant.env}
        if logs is not None:
            self._environ |= {
                "UCX_LOG_LEVEL": "info",
                "UCX_PROTO_INFO": "used",
                "UCX_LOG_FILE": f"{logs}/{name}-%p",
            }

    def run(self) -> dict[str, Any]:
        """Run it. Return the result, with `error` if a process ended early."""
        before = self._free()
        os.environ.update(self._environ)  # for the processes of this variant
        try:
            peers = [Peer(prefill, self._device, self._region_bytes) for _ in range(2)]
            reader = Peer(decode, self._device, self._region_bytes)
        finally:
            for key in self._environ:
                del os.environ[key]
        try:
            self._measure(reader, *peers)
        except RuntimeError as exc:
            self.result["error"] = str(exc)
        finally:
            for process in (reader, *peers):
                process.kill()
        self.result["left_after_all_ended_mib"] = round((before - self._until(before)) / MIB)
        return self.result

    def _free(self) -> int:
        return int(self._watcher.call(True))

    def _until(self, wanted: int) -> int:
        until_s = time.monotonic() + _POLL_S
        while (free := self._free()) < wanted - _SLACK_MIB * MIB and time.monotonic() < until_s:
            time.sleep(0.01)
        return free

    def _measure(self, reader: Peer, first: Peer, second: Peer) -> None:
        reader.answer()
        first_memory = first.answer()
        second_memory = second.answer()
        found = self.result
        found["connect"] = reader.call("connect", "first", *first_memory)
        for shape in ("blocks", "large", "pages"):
            found[shape] = reader.call("read", "first", shape, 12)
        found["kernels"] = reader.call("compute", "first")
        full = self._free()
        if self._variant.is_killed_reading:
            reader.pipe.send(("read_for", "first", 4.0))
            time.sleep(1.0)
        first.kill()
        if self._variant.is_killed_reading:
            found["reads_while_killed"] = reader.answer()
        held = self._region_bytes * REGIONS
        wanted = full + held + (UNREGISTERED_MIB * MIB if self._device != "cpu" else 0)
        found["after"] = {}
        for step in self._variant.steps:
            begun_s = time.monotonic()
            done = reader.call(step, "first")
            now = self._until(wanted)
            found["after"][step] = {
                "still_used_mib": round((wanted - now) / MIB),
                "within_s": round(time.monotonic() - begun_s, 2),
                **done,
            }
        if "close" not in self._variant.steps:
            found["reads_from_the_second"] = [reader.call("connect", "second", *second_memory)]
            found["reads_from_the_second"].append(reader.call("read", "second", "large", 5))
            found["used_after_second_mib"] = round((wanted - self._free()) / MIB)


def main() -> None:
    """Run the variants and write the result after each."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.dead_peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--variants", default=",".join(VARIANTS), help=f"comma-separated, of {', '.join(VARIANTS)}")
    add(
        "--device",
        default="cuda:0",
        help="cuda:0, or cpu to try it without a GPU (default: cuda:0)",
    )
    add(
        "--gib", type=float, default=8.0, help="registered memory of a prefill process (default: 8)"
    )
    add("--logs", type=Path, help="folder for UCX's logs, which name the transports")
    add("--out", type=Path, default=Path("dead-peer.json"), help="the result file")
    args = parser.parse_args()
    watcher = Peer(watch, args.device)
    found: dict[str, Any] = {
        "what": "dead-peer",
        "machine": machine.machine(),
        "versions": machine.versions(),
    }
    found |= {"gib": args.gib, "device": args.device, "results": []}
    for name in args.variants.split(","):
        begun_s = time.monotonic()
        result = Trial(
            name, watcher, args.device, int(args.gib * 1024 * MIB) // REGIONS, args.logs
        ).run()
        found["results"].append(result | {"seconds": round(time.monotonic() - begun_s, 1)})
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        sys.stdout.write(f"{msgspec.json.encode(found['results'][-1]).decode()}\n")
        sys.stdout.flush()
    watcher.kill()


if __name__ == "__main__":
    main()
