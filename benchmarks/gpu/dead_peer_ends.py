"""The processes of `dead_peer`: two that stand for prefill workers, a reader for a decode worker,
and a watcher.
"""

from __future__ import annotations

import ctypes
import gc
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

REGIONS = 8  # registered allocations of a prefill process, as vLLM has one for each layer
UNREGISTERED_MIB = 2048  # stands for weights
MIB = 1 << 20
_BLOCKS = 16  # per region, of the read of blocks
# Bytes of a page, and pages per region: vLLM's blocks of 16 tokens.
_PAGE = 16 << 10
_PAGES = 1024


def watch(pipe: Connection, device: str) -> None:
    """Answer each message with the free bytes of the GPU; on a CPU with 0."""
    import torch

    while pipe.recv():
        pipe.send(torch.cuda.mem_get_info(device)[0] if device != "cpu" else 0)


def prefill(pipe: Connection, device: str, region_bytes: int) -> None:
    """Register memory, send its description, and wait to be killed."""
    import torch

    agent = _agent(device)
    regions = [
        torch.full((region_bytes,), 1 + n, dtype=torch.uint8, device=device) for n in range(REGIONS)
    ]
    other = torch.zeros(
        UNREGISTERED_MIB * MIB if device != "cpu" else 1, dtype=torch.uint8, device=device
    )
    if device != "cpu":
        torch.cuda.synchronize()
    agent.register_memory(regions)
    pipe.send((agent.get_agent_metadata(), [region.data_ptr() for region in regions]))
    pipe.recv()
    del other


def decode(pipe: Connection, device: str, region_bytes: int) -> None:
    """Run the commands that arrive, and answer each with its result or its error."""
    reader = Reader(device, region_bytes)
    pipe.send("ready")
    while True:
        name, *arguments = pipe.recv()
        try:
            pipe.send(getattr(reader, name)(*arguments))
        except Exception as exc:  # noqa: BLE001 - the caller reports it
            pipe.send({"error": f"{type(exc).__name__}: {exc}"})


def _agent(device: str) -> Any:
    """Return a NIXL agent with vLLM's settings.

    As in vLLM, the process has a CUDA context before.
    """
    import torch

    if device != "cpu":
        torch.zeros(1, device=device)
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(uuid.uuid4().hex, nixl_agent_config(num_threads=4))


class Reader:
    """The decode process: reads, its own kernels, and the steps after the death of a prefill
    process.
    """

    def __init__(self, device: str, region_bytes: int) -> None:
        import torch

        self._device = device
        self._piece = region_bytes // 8
        small = min(MIB, self._piece // _BLOCKS)
        self._shapes = {
            "blocks": [
                (n, block * small, small) for n in range(REGIONS) for block in range(_BLOCKS)
            ],
            "large": [(n, 0, self._piece) for n in range(REGIONS)],
            "pages": [
                (n, page * _PAGE, _PAGE)
                for n in range(REGIONS)
                for page in range(min(_PAGES, self._piece // _PAGE))
            ],
        }
        self._kind = "DRAM" if device == "cpu" else "VRAM"
        self._agent = _agent(device)
        self._target = torch.zeros(REGIONS * region_bytes // 8, dtype=torch.uint8, device=device)
        self._registered = self._agent.register_memory([self._target])
        self._posts_s: list[float] = []
        self._remote: dict[str, tuple[str, dict[str, tuple[Any, Any, int]]]] = {}

    def connect(self, name: str, metadata: bytes, bases: Sequence[int]) -> dict[str, Any]:
        """Add a prefill process, and prepare reads: of blocks (1 MiB), of an eighth of each region,
        and of pages.
        """
        agent = self._agent
        handles = {}
        peer = agent.add_remote_agent(metadata)
        for shape, parts in self._shapes.items():
            remote = [(bases[n] + at, size, 0) for n, at, size in parts]
            local = [
                (self._target.data_ptr() + n * self._piece + at, size, 0) for n, at, size in parts
            ]
            handles[shape] = (
                agent.prep_xfer_dlist("NIXL_INIT_AGENT", agent.get_xfer_descs(local, self._kind)),
                agent.prep_xfer_dlist(peer, agent.get_xfer_descs(remote, self._kind)),
                len(parts),
            )
        self._remote[name] = (peer, handles)
        return {}

    def read(self, name: str, shape: str, count: int) -> dict[str, Any]:
        """Read some times.

        Return the milliseconds of the first read and the median of the others.
        """
        self._posts_s.clear()
        times = [self._read(name, shape) for _ in range(count)]
        rest = sorted(times[1:]) or times
        posts = sorted(self._posts_s)
        num_bytes = sum(part[2] for part in self._shapes[shape])
        middle = rest[len(rest) // 2]
        self._check()
        return {
            "first_ms": _ms(times[0]),
            "median_ms": _ms(middle),
            "worst_ms": _ms(rest[-1]),
            "post_ms": _ms(posts[len(posts) // 2]),
            "gb_per_s": round(num_bytes / middle / 1e9, 1),
        }

    def _check(self) -> None:
        found = [int(self._target[n * self._piece]) for n in range(REGIONS)]
        if found != list(range(1, REGIONS + 1)):
            raise ValueError(f"wrong bytes were read: {found}")

    def _read(self, name: str, shape: str) -> float:
        begun_s = time.perf_counter()
        local, remote, count = self._remote[name][1][shape]
        numbers = list(range(count))
        handle = self._agent.make_prepped_xfer("READ", local, numbers, remote, numbers, b"done")
        try:
            state = self._agent.transfer(handle)
            self._posts_s.append(time.perf_counter() - begun_s)
            while state == "PROC" and time.perf_counter() < begun_s + 5:
                time.sleep(0.00005)
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the read ended as {state}")
        return time.perf_counter() - begun_s

    def read_for(self, name: str, seconds: float) -> dict[str, Any]:
        """Read until an error, or for some seconds.

        Return how many reads ended well, and the error.
        """
        until_s = time.perf_counter() + seconds
        done = 0
        try:
            while time.perf_counter() < until_s:
                self._read(name, "large")
                done += 1
        except Exception as exc:  # noqa: BLE001 - of a dead process
            return {"reads": done, "ended_with": f"{type(exc).__name__}: {exc}"[:200]}
        return {"reads": done, "ended_with": ""}

    def compute(self, name: str) -> dict[str, Any]:
        """Run CUDA graphs of about 5 ms one after the other, alone and beside reads.

        Return their milliseconds.
        """
        if self._device == "cpu":
            return {}
        import torch

        alone = self._graphs(1.0)
        ended = threading.Event()
        reads = []

        def reading() -> None:
            torch.cuda.set_device(self._device)
            while not ended.is_set():
                reads.append(self._read(name, "blocks"))
                time.sleep(0.02)

        thread = threading.Thread(target=reading)
        thread.start()
        beside = self._graphs(1.5)
        ended.set()
        thread.join()
        reads.sort()
        return {"alone": alone, "beside_reads": beside, "read_ms": _quantiles(reads)}

    def _graphs(self, seconds: float) -> dict[str, float]:
        import torch

        if not hasattr(self, "_graph"):
            a = torch.randn(4096, 4096, device=self._device, dtype=torch.bfloat16)
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                a @ a
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                for _ in range(24):
                    a @ a
        times = []
        until_s = time.perf_counter() + seconds
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        while (begun_s := time.perf_counter()) < until_s:
            self._graph.replay()
            event.record()
            event.synchronize()
            times.append(time.perf_counter() - begun_s)
        return _quantiles(sorted(times[5:]))

    def nothing(self, name: str) -> dict[str, Any]:
        """Do nothing."""
        return {}

    def forget(self, name: str) -> dict[str, Any]:
        """Release what NIXL has of a prefill process, as vLLM's `_cleanup_remote_engine` does."""
        peer, handles = self._remote.pop(name)
        for _, remote, _ in handles.values():
            self._agent.release_dlist_handle(remote)
        self._agent.remove_remote_agent(peer)
        return {}

    def purge(self, name: str) -> dict[str, Any]:
        """Destroy UCX's mappings of dead processes through its library, without its knowledge (UCX
        1.23).
        """
        return {"purged_pids": purge()}

    def close(self, name: str) -> dict[str, Any]:
        """Deregister the target and end the agent."""
        self._agent.deregister_memory(self._registered)
        del self._agent
        gc.collect()
        return {}


class _Cache(ctypes.Structure):
    """UCX's hash table of remote mappings (`uct_cuda_ipc_remote_cache` of 1.23)."""

    _fields_ = [
        ("buckets", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("occupied", ctypes.c_uint32),
        ("bound", ctypes.c_uint32),
        ("flags", ctypes.POINTER(ctypes.c_uint32)),
        ("keys", ctypes.POINTER(ctypes.c_uint32 * 3)),  # process id, its namespace, device
        ("caches", ctypes.POINTER(ctypes.c_void_p)),
    ]


def purge() -> list[int]:
    """Destroy the mappings of dead processes in this process.

    Return their ids. No read may run meanwhile.
    """
    found = re.search(
        r"\S+libuct_cuda\S*\.so\S*", Path("/proc/self/maps").read_text(encoding="utf-8")
    )
    if found is None:
        return []
    library = ctypes.CDLL(found[0])
    destroy: Callable[[ctypes.c_void_p], None] = library.uct_cuda_ipc_destroy_cache
    table = _Cache.in_dll(library, "uct_cuda_ipc_remote_cache")
    purged = []
    for n in range(table.buckets):
        shift = (n & 15) << 1
        if table.flags[n >> 4] >> shift & 3:  # empty or deleted
            continue
        pid = table.keys[n][0]
        if not Path(f"/proc/{pid}").exists():
            table.flags[n >> 4] |= 1 << shift
            table.size -= 1
            destroy(ctypes.c_void_p(table.caches[n]))
            purged.append(pid)
    return purged


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: _ms(values[min(len(values) - 1, int(share * len(values)))])
        for name, share in shares.items()
    }
