"""What this project adds to vLLM's worker processes: freeing the KV of a ticket that will not be redeemed, ending
vLLM's processes when the worker they belong to was killed, and dummy weights for benchmarks.

Loaded there by name (`worker_extension_cls`) and called over `collective_rpc`. vLLM itself frees such KV only when its
lease is over; this ends the lease now, on the connector's own path for expired requests.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import select
import signal
import sys
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

_SHARPER = 1.7  # queries and keys: a prompt's tokens are attended to unequally, so that each one counts
# MXFP4: two numbers of four bits in a byte, whose deviation is 2.9 when all are as likely, and for 32 of them a scale,
# the exponent of two plus 127 (OCP Microscaling Formats 1.0).
_FP4_DEVIATION = 2.9
_EXPONENT_BIAS = 127


class Normal(NamedTuple):
    """Floating-point numbers."""

    mean: float
    deviation: float


class Bytes(NamedTuple):
    """Packed ones."""

    lowest: int
    highest: int


def drawn_from(name: str, shape: Sequence[int], *, is_packed: bool = False) -> Normal | Bytes | None:
    """What a weight of this name and shape is made of, before kernels rearrange it; None: it stays as it is."""
    if is_packed:
        return _packed(name, shape)
    if "scale" in name:
        return None
    if "bias" in name or len(shape) == 1:
        return Normal(1.0 if "norm" in name and "bias" not in name else 0.0, 0.0)
    if len(shape) < 2:
        return None
    if "embed" in name:
        return Normal(0.0, 1.0)
    return Normal(0.0, (_SHARPER if "qkv" in name else 1.0) / math.sqrt(shape[-1]))


def _packed(name: str, shape: Sequence[int]) -> Bytes | None:
    if not name.endswith(("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")):
        return None
    if not name.endswith("scale"):
        return Bytes(0, 255)
    wanted = 1 / math.sqrt(32 * shape[-1])
    exponent = _EXPONENT_BIAS + round(math.log2(wanted / _FP4_DEVIATION))
    return Bytes(exponent, exponent)


def fill_dummy(model: Any) -> int:
    """Overwrites the weights of a torch module in place; how many."""
    import torch

    count = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_packed = weight.dtype == torch.uint8
            if not is_packed and not weight.is_floating_point():
                continue
            numbers = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
            match drawn_from(name, weight.shape, is_packed=is_packed):
                case None:
                    continue
                case Normal(mean, 0.0):
                    weight.fill_(mean)
                case Normal(mean, deviation):
                    weight.normal_(mean, deviation, generator=numbers)
                case Bytes(lowest, highest):
                    weight.random_(lowest, highest + 1, generator=numbers)
            count += 1
    return count


def install() -> None:
    """From here on vLLM's load format `dummy` in this process makes these up."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    dummy: Any = loaders.DummyModelLoader

    class DummyWeightsLoader(dummy):  # type: ignore[misc]  # of a vendor that is not typed here
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            fill_dummy(model)

    loaders.register_model_loader("dummy")(DummyWeightsLoader)


class WorkerExtension:
    """Mixed into vLLM's worker class, one per rank."""

    def dynamo_release_kv(self, request_ids: list[str]) -> list[str]:
        """Ends the leases of finished prefill requests, by the ids they were submitted with; returns those found.

        The KV is free after the engine's next step, which comes at once while any lease is open.
        """
        worker = _connector_worker()
        if worker is None:
            return []
        wanted = set(request_ids)
        ours = {held: name for held in worker._reqs_to_send if (name := held.rpartition("-")[0]) in wanted}
        if ours:
            rest = {held: expiry for held, expiry in worker._reqs_to_send.items() if held not in ours}
            worker._reqs_to_send = {**dict.fromkeys(ours, 0.0), **rest}  # looked through from the oldest on
        return sorted(ours.values())

    def dynamo_bind_lifetime(self, pid: int) -> bool:
        """vLLM's processes end when process `pid` does, and let go of its GPUs. False: this system can't tell."""
        if not hasattr(os, "pidfd_open"):
            return False
        watched = os.pidfd_open(pid)
        threading.Thread(target=_die_after, args=(watched, pid), name="dynamo-die-with", daemon=True).start()
        return True


def _die_after(watched: int, pid: int) -> None:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid not in (None, pid, os.getpid()):
        try:
            os.kill(parent.pid or 0, signal.SIGKILL)  # the engine process, whose child this one is
        except ProcessLookupError:
            pass  # it was quicker
    os.kill(os.getpid(), signal.SIGKILL)


def _connector_worker() -> Any:
    """NixlConnector's half in this process; None where there is no connector."""
    from dynamo_trtllm.engines.vllm.bindings import kv_transfer_group

    return getattr(kv_transfer_group(), "connector_worker", None)


if "vllm.v1.worker.worker_base" in sys.modules:  # one of vLLM's workers, which loads this module before any weight
    install()
