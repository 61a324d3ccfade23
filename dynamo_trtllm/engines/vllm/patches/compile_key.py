"""Make vLLM find the compiled code of a model also if the model is in another folder.

Without this patch, the path of the model's folder is a part of the key of compiled code.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

from dynamo_trtllm.engines.vllm.patches.patch import Patch, apply

PATCH = Patch(
    name="compile_key",
    fault="a model that was moved, or mounted at another path, is compiled again",
    upstream="https://github.com/vllm-project/vllm/pull/53193",
    needed_in="all",
    detection=(
        "always on; the key also has the whole config.json, and weights are no part of compiled"
        " code"
    ),
    goes="when that change is in the oldest supported release",
    is_vital=False,
)


def install() -> None:
    """Take the folder's path out of the key of compiled code in this process."""
    apply(PATCH, lambda: True, _take_out_path)


def _take_out_path() -> None:
    model_config: Any = importlib.import_module("vllm.config").ModelConfig
    compute_hash = model_config.compute_hash

    def compute_hash_without_path(self: Any) -> str:
        without_path = copy.copy(self)
        without_path.model = ""
        key: str = compute_hash(without_path)
        return key

    model_config.compute_hash = compute_hash_without_path
