"""A process that offers KV for the contract tests.

Reads commands from stdin and writes answers to stdout, by line.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import deque

from dynamo_trtllm.kv_transfer.memory import MemoryRegion, address_of
from tests.kit.loopback_backend import named_backend

if __name__ == "__main__":
    # NIXL 1.5 imports a torch without CUDA only to learn its CUDA version, which takes 2 s of CPU.
    sys.modules["torch"] = None  # type: ignore[assignment]


def content(seed: str, num_bytes: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(num_bytes))


# Threads of the backend may read offered memory until it is closed, after the test's own variables
# are gone.
_OFFERED: deque[bytearray] = deque(maxlen=8)


def split(buffer: bytearray, sizes: list[int]) -> list[MemoryRegion]:
    _OFFERED.append(buffer)
    start = address_of(buffer)
    regions = []
    for size in sizes:
        regions.append(MemoryRegion(start, size))
        start += size
    return regions


def say(**answer: object) -> None:
    # marked, because libraries may write to stdout as well
    sys.stdout.write("@" + json.dumps(answer) + "\n")
    sys.stdout.flush()


async def main(name: str) -> None:
    backend = named_backend(name)
    await backend.start(lambda transfer_id: say(fetched=transfer_id))
    held: dict[str, bytearray] = {}
    say(ready=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        verb, transfer_id, *sizes = line.split()
        if verb == "offer":
            sizes_bytes = [int(size) for size in sizes]
            buffer = held[transfer_id] = content(transfer_id, sum(sizes_bytes))
            offer = await backend.publish(transfer_id, split(buffer, sizes_bytes))
            say(offer=offer.hex())
        else:
            await backend.unpublish(transfer_id)
            say(withdrawn=transfer_id)
    await backend.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
