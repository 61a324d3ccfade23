"""List the GPUs that this process may use and their memory, from the driver, without a CUDA
context.

Engines ask NVML. `list_gpus` asks nvidia-smi, which needs no Python package and can't block this
process.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_trtllm.config.load import process_environment
from dynamo_trtllm.protocol.number_text import is_digits

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=uuid,memory.total,memory.free,name",
    "--format=csv,noheader,nounits",
)
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # Linux, WSL


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as the driver describes it."""

    name: str
    sm: int  # compute capability times ten: 90 Hopper, 100 Blackwell, 120 RTX Blackwell
    memory_bytes: int  # total
    free_bytes: int = field(default=0, compare=False)  # free memory at this moment; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """One GPU and its memory at this moment."""

    number: int  # GPUs are numbered in the order of the PCI bus
    name: str
    total_bytes: int
    free_bytes: int


def list_gpus(
    environment: Mapping[str, str], timeout_s: float = 20.0
) -> tuple[list[GpuMemory], str]:
    """Return the GPUs that a process with this environment may use. If there are none, also return
    the reason.

    Args:
        environment: environment variables of the process.
        timeout_s: longest wait for nvidia-smi, which loads the driver if persistence mode is off.
    """
    try:
        listed = subprocess.run(
            _NVIDIA_SMI, capture_output=True, text=True, timeout=timeout_s, check=True
        ).stdout
    except FileNotFoundError:
        return [], "nvidia-smi is not installed"
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {timeout_s:g} s"
    except subprocess.CalledProcessError as exc:
        return [], f"nvidia-smi failed with status {exc.returncode}"
    rows = [line.split(", ", 3) for line in listed.splitlines() if line.startswith("GPU-")]
    gpus = [
        GpuMemory(
            number=number, name=name, total_bytes=int(total) << 20, free_bytes=int(free) << 20
        )
        for number, (_, total, free, name) in enumerate(rows)
    ]
    if not gpus:
        return [], "nvidia-smi lists none"
    ids = [row[0] for row in rows]
    visible = [gpus[number] for number in _chosen(environment.get(VISIBLE), ids)]
    if not visible:
        return [], f"{VISIBLE} hides all"
    return visible, ""


def visible_gpus(environment: Mapping[str, str] | None = None) -> list[Gpu]:
    """Return the visible GPUs; [] without a driver or NVML.

    Args:
        environment: variables that CUDA_VISIBLE_DEVICES is read from; default: this process's. If
            the variable is not set, all GPUs are returned in the driver's order.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        env = process_environment() if environment is None else environment
        chosen = _chosen(env.get(VISIBLE), [pynvml.nvmlDeviceGetUUID(handle) for handle in handles])
        return [_gpu(pynvml, handles[index]) for index in chosen]
    except pynvml.NVMLError:
        return []
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def count_visible(environment: Mapping[str, str]) -> int | None:
    """Return how many GPUs a process with this environment may use; None if the driver does not
    respond.
    """
    if gpus := visible_gpus(environment):
        return len(gpus)
    # Without the variable CUDA_VISIBLE_DEVICES, all GPUs are visible.
    does_driver_respond = bool(visible_gpus({}))
    has_driver = any(path.exists() for path in _DRIVERS)
    return 0 if does_driver_respond or not has_driver else None


def free_and_total_bytes() -> list[tuple[int, int]]:
    """Return the free and total bytes of each visible GPU; [] without a driver or NVML.

    Thread-safe.
    """
    return [(gpu.free_bytes, gpu.memory_bytes) for gpu in visible_gpus()]


def memory_used_bytes() -> int | None:
    """Return the bytes that all processes use on the first visible GPU; None without a driver or
    NVML. Thread-safe.
    """
    return next((total - free for free, total in free_and_total_bytes()), None)


def _chosen(visible: str | None, uuids: list[str]) -> list[int]:
    """Return the indexes of the visible GPUs, by CUDA's rules for CUDA_VISIBLE_DEVICES.

    Entries are numbers or prefixes of UUIDs. CUDA ignores an unknown entry and all entries after
    it; an empty text hides all GPUs. The UUID of a MIG slice matches no GPU and counts as unknown.
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in (part.strip() for part in visible.split(",")):
        if is_digits(word):
            found = [int(word)] if int(word) < len(uuids) else []
        else:
            found = [i for i, uuid in enumerate(uuids) if word and uuid.startswith(word)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def _gpu(nvml: Any, handle: Any) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        sm=major * 10 + minor,
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )
