"""The connector: its half that says how much is read and where handshakes are waited for, and its
half that reads.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
)
from vllm.standin.release import REPORTS_FAILED_READS


class Worker:
    """Reads that have ended, and leases of finished prefills."""

    def __init__(self) -> None:
        self._reqs_to_send: dict[str, float] = {}
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._recving_metadata: dict[str, Any] = {}

    def received(self, req_id: str) -> None:
        self._ended.add(req_id)

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        """Begins a read; the stand-in's core copies the KV itself."""

    def read_failed(self, req_id: str) -> None:
        if not self._handle_failed_transfer(req_id, None):
            assert not REPORTS_FAILED_READS, "a handle is kept, and nothing will release it"

    def _handle_failed_transfer(self, req_id: str, handle: int | None) -> bool | None:
        """Over several KV groups vLLM 0.24.0 keeps no account of it: the read has ended, like one
        that went well.
        """
        self._ended.add(req_id)
        if not REPORTS_FAILED_READS:
            return None
        self._failed.add(req_id)
        return True  # the handle may be forgotten

    def get_finished(self) -> set[str]:
        ended = self._ended
        self._ended = set()
        return ended

    def get_transfer_results(self) -> KVConnectorTransferResults:
        failed = self._failed
        self._failed = set()
        return KVConnectorTransferResults(
            finished_recving=self.get_finished(), failed_recving=failed
        )


class NixlPullConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.connector_scheduler = self.connector_worker = None
        if role == "worker":
            self.connector_worker = Worker()
            return
        self.connector_scheduler = SimpleNamespace(
            block_size=vllm_config.cache_config.block_size,
            side_channel_host=os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"),
            side_channel_port=int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")),
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return len(request.prompt_token_ids) - num_computed_tokens, True
        return 0, False

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return set(), self.connector_worker.get_finished()

    if REPORTS_FAILED_READS:

        def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
            return self.connector_worker.get_transfer_results()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        request.kv_transfer_params["do_remote_prefill"] = False

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def build_connector_worker_meta(self) -> Any:
        return None
