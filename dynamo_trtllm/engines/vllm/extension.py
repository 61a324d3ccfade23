"""Extend vLLM's worker processes.

They release unfetched KV, end with the worker, compile kernels early, and load dummy weights.

vLLM loads this module by name (`worker_extension_cls`), and the engine calls it over
`collective_rpc`. vLLM itself frees unfetched KV only when the lease of the KV expires. The
extension ends the lease early, so that the connector's own code for expired leases frees the KV.
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
from typing import Any

from dynamo_trtllm.engines.vllm import compilation, compile_lock, start_progress
from dynamo_trtllm.engines.vllm.patches import compile_key, decode_graphs, triton_constants

# Scale of queries and keys, so that attention differs between tokens and each token matters.
_SHARPER = 1.7
# MXFP4 (OCP Microscaling Formats 1.0): a byte has two 4-bit numbers, whose standard deviation is
# 2.9 if all values are equally likely. 32 numbers share a scale: the exponent of two, plus 127.
_FP4_DEVIATION = 2.9
_EXPONENT_BIAS = 127


def fill_dummy(model: Any) -> int:
    """Overwrite the weights of a torch module with dummy values. Return the number of tensors."""
    import torch

    num_filled = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if _fill(name, weight):
                num_filled += 1
    return num_filled


def _fill(name: str, weight: Any) -> bool:
    """Overwrite a weight with numbers that depend only on its name.

    Return False if it stays as it is.
    """
    import torch

    # The shape before kernels rearrange the weight.
    shape = weight.shape
    generator = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
    if weight.dtype == torch.uint8:
        if name.endswith(("w13_weight_scale", "w2_weight_scale")):
            wanted = 1 / math.sqrt(32 * shape[-1])
            weight.fill_(_EXPONENT_BIAS + round(math.log2(wanted / _FP4_DEVIATION)))
        elif name.endswith(("w13_weight", "w2_weight")):
            weight.random_(0, 256, generator=generator)
        else:
            return False
    elif not weight.is_floating_point() or "scale" in name:
        return False
    elif "bias" in name or len(shape) == 1:
        is_norm_scale = "norm" in name and "bias" not in name
        weight.fill_(1.0 if is_norm_scale else 0.0)
    elif len(shape) < 2:
        return False
    else:
        weight.normal_(0.0, _deviation(name, shape[-1]), generator=generator)
    return True


def _deviation(name: str, inputs: int) -> float:
    """Return the standard deviation of a matrix. `inputs`: its number of inputs."""
    if "embed" in name:
        return 1.0
    scale = _SHARPER if "qkv" in name else 1.0
    return scale / math.sqrt(inputs)


def install() -> None:
    """Make vLLM's load format `dummy` in this process use these dummy weights."""
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    dummy: Any = loaders.DummyModelLoader

    class DummyWeightsLoader(dummy):  # type: ignore[misc]  # vLLM is not typed here
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            fill_dummy(model)

    loaders.register_model_loader("dummy")(DummyWeightsLoader)


class WorkerExtension:
    """The methods that vLLM adds to its worker class, one object per rank."""

    model_runner: Any  # the model runner of the worker of vLLM

    def dynamo_run_pass(self, tokens: int) -> None:
        """Run one pass of the model with `tokens` tokens, which compiles the kernels for it."""
        self.model_runner._dummy_run(tokens, skip_eplb=True)

    def dynamo_count_compilations(self, begins: bool) -> int:
        """Begin or end counting the kernels that Triton compiles.

        Returns:
            The count, 0 at the beginning and without Triton.
        """
        return compilation.count_compilations(begins=begins)

    def dynamo_release_kv(self, request_ids: list[str]) -> list[str]:
        """End the leases of finished prefill requests.

        The KV is free after the engine's next step, which follows at once while any lease is open.

        Args:
            request_ids: the ids with which the requests were submitted.

        Returns:
            The ids for which this rank has a lease.
        """
        from dynamo_trtllm.engines.vllm.bindings import kv_transfer_group

        worker = getattr(kv_transfer_group(), "connector_worker", None)
        if worker is None:
            return []
        wanted = set(request_ids)
        released = []
        ended: dict[str, float] = {}
        others: dict[str, float] = {}
        for leased, expiry in worker._reqs_to_send.items():
            # vLLM appends a suffix to the id with which a request was submitted.
            request_id, _, _ = leased.rpartition("-")
            if request_id in wanted:
                released.append(request_id)
                ended[leased] = 0.0
            else:
                others[leased] = expiry
        if ended:
            # Up to 0.30 vLLM looks for expired leases in this order, and stops at the first lease
            # that has not expired. So the leases that end now come first.
            worker._reqs_to_send = ended | others
        return sorted(released)

    def dynamo_bind_lifetime(self, pid: int) -> bool:
        """End vLLM's processes when process `pid` ends, so that they release their GPUs.

        Returns:
            False if this system has no pidfd_open.
        """
        if not hasattr(os, "pidfd_open"):
            return False
        watched = os.pidfd_open(pid)
        thread = threading.Thread(
            target=_die_after, args=(watched, pid), name="dynamo-die-with", daemon=True
        )
        thread.start()
        return True


def _die_after(watched: int, pid: int) -> None:
    """Wait until the watched process ends, then kill vLLM's engine process and this process."""
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    # In the engine process itself, the parent is the watched process, which has ended.
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid not in (None, pid, os.getpid()):
        try:
            os.kill(parent.pid or 0, signal.SIGKILL)  # the engine process, the parent of this one
        except ProcessLookupError:
            # The process has already ended.
            pass
    os.kill(os.getpid(), signal.SIGKILL)


if "vllm.v1.worker.worker_base" in sys.modules:  # a vLLM worker loads this module before any weight
    install()
    triton_constants.install()
    compile_key.install()
    for _module, _name in (("gpu_worker", "Worker"), ("cpu_worker", "CPUWorker")):
        _loaded = sys.modules.get(f"vllm.v1.worker.{_module}")
        if _loaded is not None:
            _worker_class = getattr(_loaded, _name)
            start_progress.note_phases(_worker_class, start_progress.runner_of_flashinfer())
            compile_lock.lock_first_pass(_worker_class)
    decode_graphs.install()
