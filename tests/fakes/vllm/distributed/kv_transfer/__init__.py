"""In vLLM this is per worker process; here per thread of control that calls an extension."""

from __future__ import annotations

from typing import Any

current: Any = None


def has_kv_transfer_group() -> bool:
    return current is not None


def get_kv_transfer_group() -> Any:
    return current
