"""Make vLLM's workers of prefill engines capture no CUDA graphs of decode steps, because prefill
engines never run decode steps.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from dynamo_trtllm.engines.vllm.patches.patch import Patch, apply

# A key of `kv_connector_extra_config`, because this configuration is no part of the key of compiled
# code.
NEVER_DECODES = "dynamo_never_decodes"

PATCH = Patch(
    name="decode_graphs",
    fault="a prefill engine spends 2 to 5 s of its start on CUDA graphs that it never uses",
    upstream="none known",
    needed_in="all, with the first model runner (the default of gpt-oss up to 0.28)",
    detection=(
        "the model runner has a `cudagraph_dispatcher`; the second one has none and captures all"
        " graphs"
    ),
    goes="with the first model runner",
    is_vital=False,
)


def install() -> None:
    """Change the GPU worker's class, if this process has loaded it."""
    loaded = sys.modules.get("vllm.v1.worker.gpu_worker")
    if loaded is not None:
        apply(PATCH, lambda: True, lambda: skip_before_capture(loaded.Worker))


def skip_before_capture(worker_class: Any) -> None:
    """Remove the keys of graphs of decode steps before capture.

    If a step needs a graph all the same, vLLM uses a graph of mixed steps.

    The configuration could also leave out these graphs. But it is a part of the key of compiled
    code, so prefill and decode engines could then not use the same compiled code.
    """
    capture = worker_class.compile_or_warm_up_model

    @functools.wraps(capture)
    def compile_or_warm_up_model(self: Any) -> Any:
        transfer = self.vllm_config.kv_transfer_config
        dispatcher: Any = getattr(self.model_runner, "cudagraph_dispatcher", None)
        extra = {} if transfer is None else transfer.kv_connector_extra_config
        can_skip = dispatcher is not None and extra.get(NEVER_DECODES)
        # Without a separate routine for decode steps, graphs of mixed steps have the mode FULL,
        # too, and must stay.
        if can_skip and dispatcher.cudagraph_mode.separate_routine():
            for mode, keys in dispatcher.cudagraph_keys.items():
                if mode.name == "FULL":
                    keys.clear()
        return capture(self)

    worker_class.compile_or_warm_up_model = compile_or_warm_up_model
