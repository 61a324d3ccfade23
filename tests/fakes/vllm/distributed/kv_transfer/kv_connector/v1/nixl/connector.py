"""The connector's half that says how much is read, and where handshakes are waited for."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


class NixlPullConnector:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.connector_scheduler = SimpleNamespace(
            block_size=vllm_config.cache_config.block_size,
            side_channel_host=os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"),
            side_channel_port=int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")),
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return len(request.prompt_token_ids) - num_computed_tokens, True
        return 0, False
