"""`ExecutorMemoryType`: kinds of GPU memory that can be released, as 1.3 has them, not all; and
`KvCacheConfig`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from tensorrt_llm.standin.release import field_names


class KvCacheConfig:
    """Only the names of its fields, where pydantic has them."""

    model_fields: ClassVar[dict[str, object]] = dict.fromkeys(field_names("KvCacheConfig"))


class ExecutorMemoryType(StrEnum):
    SAMPLER = "sampler"
    KV_CACHE = "kv_cache"
    MODEL_ENGINE_MAIN = "model"
    MODEL_WEIGHTS_MAIN = "model_weights"
