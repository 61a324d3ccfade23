"""Read the size of the running engine's KV cache, and compare the size of its blocks with the
arguments.

A model class of newer builds may choose the block size, if the arguments do not set it: 64 tokens
for Kimi K3, 128 for DeepSeek V4 (`apply_model_defaults_to_llm_args` in llmapi/llm_utils.py, main of
2026). So the size is read from the running engine. TensorRT-LLM's own router takes the size from
its workers, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from dynamo_trtllm.engines.trtllm.preflight.facts import BLOCK_SIZE, RoleFacts
from dynamo_trtllm.protocol.errors import ConfigError

log = logging.getLogger(__name__)


class KvCacheSize(NamedTuple):
    """The KV cache of one rank, as the engine reports it. A value that is not reported is 0."""

    blocks: int = 0
    block_tokens: int = 0  # tokens in one block


def kv_cache_size(reported: Mapping[str, Any] | None) -> KvCacheSize:
    """Convert `kvCacheStats` of a row of statistics, or the result of `LLM.get_kv_cache_capacity`.

    Both mappings have the same names. Some candidates of 1.3 may not fill `tokensPerBlock` with
    their second KV cache manager; this was not found out.

    Args:
        reported: the mapping; None if the row has none.
    """
    found = reported or {}
    return KvCacheSize(_count(found.get("maxNumBlocks")), _count(found.get("tokensPerBlock")))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def check_block_size(facts: RoleFacts, reported: KvCacheSize) -> int:
    """Return the number of tokens in one block of the running engine. If the engine does not report
    it, return the number that the arguments set.

    Args:
        facts: facts from the arguments.
        reported: what the engine reports.

    Raises:
        ConfigError: the user has set another size than the engine has.
    """
    assumed = facts.block_tokens
    actual = reported.block_tokens
    if not actual:
        log.warning(
            "TensorRT-LLM does not report its KV cache, so the size of KV blocks can't be checked:"
            " %d tokens are assumed. If the model chooses another size, set %s to it on prefill and"
            " decode workers",
            assumed,
            BLOCK_SIZE,
        )
        return assumed
    if actual == assumed:
        return actual
    if facts.is_given(BLOCK_SIZE):
        raise ConfigError(
            f"{BLOCK_SIZE} is {facts.value_with_source(BLOCK_SIZE)}, but TensorRT-LLM runs with KV"
            f" blocks of {actual} tokens. Set it to {actual} on prefill and decode workers, or"
            " remove it.",
            field=BLOCK_SIZE,
        )
    log.info("KV blocks have %d tokens and not %d, as the model chooses", actual, assumed)
    return actual


def size_change(registered: int, reported: KvCacheSize) -> str:
    """Return why the engine must stop serving, if its blocks have another size than the worker has
    registered; "" otherwise.

    Args:
        registered: tokens in one block, as other processes know them.
        reported: what the engine reports now.
    """
    actual = reported.block_tokens
    if not actual or actual == registered:
        return ""
    return (
        f"TensorRT-LLM runs with KV blocks of {actual} tokens, but this worker has registered"
        f" {registered} tokens; set {BLOCK_SIZE}: {actual} on prefill and decode workers"
    )
