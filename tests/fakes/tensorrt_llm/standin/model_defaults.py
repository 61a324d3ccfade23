"""What a model class prefers, for arguments that the caller did not set (llmapi/llm_utils.py, main
of 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorrt_llm.standin import traps

ATTENTION = "FLASHINFER"  # the one that has kernels for the model, as for Gemma 4
BLOCK_TOKENS = 64  # as for Kimi K3


def apply_model_defaults(args: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Changes the arguments.

    Raises RuntimeError if the caller chose an attention backend that can't run the model.
    """
    if not traps.is_on("model_defaults"):
        return
    args["attn_backend"] = given.get("attn_backend", ATTENTION)
    if args["attn_backend"] != ATTENTION:
        raise RuntimeError(
            "the head size of this model is not supported by attention backend"
            f" {args['attn_backend']}"
        )
    kv_cache = dict(args["kv_cache_config"] or {})
    chosen = (given.get("kv_cache_config") or {}).get("tokens_per_block")
    if chosen is None or traps.is_on("block_size_fixed"):
        chosen = BLOCK_TOKENS
    args["kv_cache_config"] = kv_cache | {"tokens_per_block": chosen}
