"""What this project adds to vLLM's worker processes: freeing the KV of a ticket that nobody will redeem.

Loaded there by name (`worker_extension_cls`) and called over `collective_rpc`. vLLM itself frees such KV only when its
lease is over; this ends the lease now, on the connector's own path for expired requests.
"""

from __future__ import annotations

from typing import Any


class TicketExtension:
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


def _connector_worker() -> Any:
    """NixlConnector's half in this process; None where there is no connector."""
    from dynamo_trtllm.engine.vllm.vendor import kv_transfer_group

    return getattr(kv_transfer_group(), "connector_worker", None)
