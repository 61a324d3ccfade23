"""Why vLLM did not start, where it is GPU memory that others hold. Pure; asks no driver."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_trtllm.engines.vllm import manifest

_GIB = 1 << 30
_SHARE = "gpu_memory_utilization"
_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

FreeAndAll = Sequence[tuple[int, int]]  # bytes of each visible GPU


def explain_oom(values: Mapping[str, Any], before: FreeAndAll, after: FreeAndAll) -> str | None:
    """Return why an engine did not start, if a GPU had too little free memory both before and after.

    `values`: engine arguments; `before` and `after`: memory of each visible GPU before and after the start that failed.
    None when each GPU of the engine had enough free memory at one of the two times: then the cause is another one.
    """
    share = values.get(_SHARE, _default(_SHARE))
    if not isinstance(share, (int, float)):
        return None
    ranks = math.prod(int(values.get(name) or 1) for name in _RANKS)
    for number, ((was, total), (now, _)) in enumerate(zip(before[:ranks], after[:ranks], strict=False)):
        free = max(was, now)
        if free < share * total:
            return _explanation(number, free, total, share)
    return None


def _explanation(number: int, free: int, total: int, share: float) -> str:
    fits = math.floor(100 * free / total) / 100
    cure = f", or give --free-gpu-memory-fraction {fits:g}, if weights and KV fit that" if fits else ""
    return (
        f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB are free on its GPU {number}, and {share:g} of all "
        f"({_SHARE}) is {share * total / _GIB:.1f} GiB: another process holds the rest. When nvidia-smi lists none, a "
        "worker that read KV from a dead one over CUDA IPC keeps that one's memory until it ends itself "
        "(https://github.com/openucx/ucx/issues/11753): restart the decode workers of this machine" + cure
    )


def _default(name: str) -> Any:
    field = manifest.find(name)
    return None if field is None else field.default
