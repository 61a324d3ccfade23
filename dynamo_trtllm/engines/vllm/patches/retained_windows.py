"""Keep the KV that a window or chunk of attention needs for the last token of a prompt.

vLLM steps back by one token after it has read the KV of a prompt (see `last_token`). By then, layers with a sliding
window have freed a key that this token still sees, if a KV block ends just there. Without an error, prompts of one
length in `block_size` lose a key in each such layer. Layers with chunked attention lose a whole chunk if it ends with
the prompt, and the two engines hold different numbers of blocks.
"""

from __future__ import annotations

import inspect
from typing import Any

from dynamo_trtllm.engines.vllm.patches.patch import Patch, apply
from dynamo_trtllm.engines.vllm.releases import PACKAGE

SLIDING = Patch(
    name="retained_windows, sliding",
    fault="layers with a sliding window lose a key for one length of prompts in `block_size`, without an error",
    upstream="none known",
    needed_in="0.24, 0.25",
    detection="`SingleTypeKVCacheManager.remove_skipped_blocks` has no parameter `processed_computed_tokens`",
    goes="with 0.25",
    is_vital=True,
)
CHUNKED = Patch(
    name="retained_windows, chunked",
    fault="a decode engine with chunked attention (Llama 4) dies on prompts that end with a chunk",
    upstream="none known",
    needed_in="all",
    detection="always on",
    goes="when vLLM keeps the chunk of the token that it computes again",
    is_vital=True,
)
_MODULE = "vllm.v1.core.single_type_kv_cache_manager"


def install() -> None:
    """Make vLLM's managers of such layers in this process free blocks one token later. Raises EngineFailed."""
    apply(SLIDING, _frees_tokens_in_flight, lambda: _retain(PACKAGE.find("SlidingWindowManager", _MODULE)))
    apply(CHUNKED, lambda: True, lambda: _retain(PACKAGE.find("ChunkedLocalAttentionManager", _MODULE)))


def _frees_tokens_in_flight() -> bool:
    """Return whether windows move on with tokens that were scheduled, and not only with those that were computed."""
    manager = PACKAGE.find("SingleTypeKVCacheManager", _MODULE)
    return "processed_computed_tokens" not in inspect.signature(manager.remove_skipped_blocks).parameters


def _retain(manager: Any) -> None:
    """Make a KV cache manager free a block one token later than vLLM does."""
    skipped = manager.get_num_skipped_tokens
    manager.get_num_skipped_tokens = lambda self, num_computed_tokens: skipped(self, max(0, num_computed_tokens - 1))
