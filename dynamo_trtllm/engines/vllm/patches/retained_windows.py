"""Keep the KV that a window or chunk of attention needs for the last token of a prompt.

A decode engine computes the last token of a prompt again, with KV that it has read (see
`last_token`). By then, both engines have freed the blocks that no later token sees, but the last
token may still see one of them:

- Layers with a sliding window lose the oldest key that the last token still sees, if a KV block
  ends with this key. This happens for one of `block_size` lengths of prompts, without an error.
- Layers with chunked attention lose a whole chunk if the chunk ends with the prompt. Then the two
  engines hold different numbers of blocks.

From 0.26 on vLLM frees blocks by the tokens that were computed, not by the tokens in flight. Then
requests whose first token comes with the decode call's prompt lose nothing. Requests whose first
token is sampled again, for example with a seed, still do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dynamo_trtllm.engines.vllm.patches.patch import Patch, apply
from dynamo_trtllm.engines.vllm.releases import PACKAGE

PATCH = Patch(
    name="retained_windows",
    fault=(
        "a key is lost in layers with a sliding window, or a decode engine with chunked attention"
        " dies"
    ),
    upstream="none known",
    needed_in=(
        "all; from 0.26 on, sliding windows only for requests whose first token is sampled again"
    ),
    detection="always on; `get_num_skipped_tokens` of both managers exists in all releases",
    goes="when vLLM keeps what the token sees that it computes again",
    is_vital=True,
)
_MODULE = "vllm.v1.core.single_type_kv_cache_manager"


def install() -> None:
    """Make vLLM's KV cache managers of these layers in this process free blocks one token later.

    Raises EngineFailed if this release's managers have another form.
    """
    for name in ("SlidingWindowManager", "ChunkedLocalAttentionManager"):
        apply(PATCH, lambda: True, partial(_retain, name))


def _retain(name: str) -> None:
    """Make a class of KV cache managers free a block one token later than vLLM does."""
    manager = PACKAGE.find(name, _MODULE)
    skipped = manager.get_num_skipped_tokens

    def get_num_skipped_tokens(self: Any, num_computed_tokens: int) -> Any:
        return skipped(self, max(0, num_computed_tokens - 1))

    manager.get_num_skipped_tokens = get_num_skipped_tokens
