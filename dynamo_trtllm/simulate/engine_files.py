"""Write the engine arguments that were simulated, as YAML for `extra-engine-args`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from dynamo_trtllm.protocol.messages import Role

# The disaggregated roles of TensorRT-LLM transfer KV through a buffer with space for a prompt.
_MIN_BUFFER_TOKENS: Final = 65536


def engine_file(
    engine: str, role: Role, mock: Mapping[str, Any], longest_prompt: int
) -> dict[str, Any] | None:
    """Return the arguments of an engine in a role that was simulated. None: it needs no file.

    Args:
        engine: name of the engine.
        role: role of the worker.
        mock: arguments of the mock engine that imitates it.
        longest_prompt: tokens of the longest prompt.
    """
    writer = _WRITERS.get(engine)
    return None if writer is None else writer(role, mock, longest_prompt)


def _vllm(role: Role, mock: Mapping[str, Any], longest_prompt: int) -> dict[str, Any]:
    names = {
        "max_num_batched_tokens": "prefill_tokens_per_step",
        "max_num_seqs": "max_batch_size",
        "block_size": "kv_block_size",
    }
    return {name: mock[mock_name] for name, mock_name in names.items() if mock_name in mock}


def _trtllm(role: Role, mock: Mapping[str, Any], longest_prompt: int) -> dict[str, Any]:
    names = {"max_num_tokens": "prefill_tokens_per_step", "max_batch_size": "max_batch_size"}
    arguments: dict[str, Any] = {
        name: mock[mock_name] for name, mock_name in names.items() if mock_name in mock
    }
    # Without chunks, a prompt that is longer than a step is rejected.
    is_longer = longest_prompt > mock.get("prefill_tokens_per_step", longest_prompt)
    arguments["enable_chunked_prefill"] = mock.get("splits_prompts", True) or is_longer
    if "kv_block_size" in mock:
        arguments["kv_cache_config"] = {"tokens_per_block": mock["kv_block_size"]}
    if role is not Role.AGGREGATED:
        tokens = max(_MIN_BUFFER_TOKENS, longest_prompt)
        arguments["cache_transceiver_config"] = {"backend": "UCX", "max_tokens_in_buffer": tokens}
    if role is Role.PREFILL:
        # Up to release 1.2.1, an engine with the overlap scheduler rejects prefill-only requests.
        arguments["disable_overlap_scheduler"] = True
    return arguments


_Writer = Callable[[Role, Mapping[str, Any], int], dict[str, Any]]
_WRITERS: Final[Mapping[str, _Writer]] = {"vllm": _vllm, "trtllm": _trtllm}
