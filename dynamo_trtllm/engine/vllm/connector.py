"""NixlConnector, and what vLLM's scheduler must do otherwise for a hand-off to lose nothing. vLLM loads this by name,
in the processes of engines that hand over or take.

A decode engine reads a whole prompt and then steps back by one token, to have one to compute (0.24.0,
`_update_waiting_for_remote_kv`). By then layers with a sliding window have let go, on both sides, of what that token
still sees, where a KV block ends just there: prompts of one length in `block_size` lose a key in each such layer, and
nobody says so. Layers that see by chunks lose a whole one, where it ends with the prompt. And a token behind the prompt
would need a block that the prefill engine does not have, where the prompt fills its last one. Knows no requests but by
vLLM's own records of them.
"""

from __future__ import annotations

from typing import Any

from dynamo_trtllm.engine.vllm import side_channel, vendor
from dynamo_trtllm.engine.vllm.requests import tokens_to_read

_Base: Any = vendor.nixl_connector()


class NixlConnector(_Base):  # type: ignore[misc]  # of a vendor that is not typed here
    """Under the name that vLLM's own has, so that what says which connector is used stays true."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            side_channel.listen_there(self.connector_scheduler, vllm_config)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond those computed here are read, and whether that happens between steps."""
        count, between_steps = super().get_num_new_matched_tokens(request, num_computed_tokens)
        params = request.kv_transfer_params or {}
        if not (between_steps and params.get("do_remote_prefill")):
            return count, between_steps
        wanted = tokens_to_read(
            num_computed_tokens + count, params.get("remote_num_tokens") or 0, self.connector_scheduler.block_size
        )
        # Nothing to read would be another path of vLLM's: then the last block is read as vLLM has it, and written over.
        return max(wanted - num_computed_tokens, 0) or count, between_steps


def _keep_what_the_last_token_sees(manager: Any) -> None:
    """Such layers let go of a block when the token after the next one no longer sees it."""
    skipped = manager.get_num_skipped_tokens
    manager.get_num_skipped_tokens = lambda self, num_computed_tokens: skipped(self, max(0, num_computed_tokens - 1))


for each in vendor.forgetful_managers():
    _keep_what_the_last_token_sees(each)
