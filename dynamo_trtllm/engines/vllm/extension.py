"""What this project adds to vLLM's worker processes: freeing the KV of a ticket that will not be redeemed, ending
vLLM's processes when the worker they belong to was killed, and dummy weights for benchmarks.

Loaded there by name (`worker_extension_cls`) and called over `collective_rpc`. vLLM itself frees such KV only when its
lease is over; this ends the lease now, on the connector's own path for expired requests.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
from typing import Any

from dynamo_trtllm.engines.vllm import dummy_weights


class WorkerExtension:
    """Mixed into vLLM's worker class, one per rank."""

    def dynamo_release_tickets(self, request_ids: list[str]) -> list[str]:
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

    def dynamo_die_with(self, pid: int) -> bool:
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
    dummy_weights.install()
