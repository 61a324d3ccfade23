"""`ExecutorMemoryType`: the kinds of GPU memory that can be released. Only some of them; 1.3 has them."""

from __future__ import annotations

from enum import StrEnum


class ExecutorMemoryType(StrEnum):
    SAMPLER = "sampler"
    KV_CACHE = "kv_cache"
    MODEL_ENGINE_MAIN = "model"
    MODEL_WEIGHTS_MAIN = "model_weights"
