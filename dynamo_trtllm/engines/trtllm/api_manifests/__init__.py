"""Describe the known releases of TensorRT-LLM, whose manifests are extracted from their published sources."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

from dynamo_trtllm.engines.manifests import ApiManifest, LibraryReleases
from dynamo_trtllm.errors import ConfigError

_log = logging.getLogger(__name__)

LIBRARY = LibraryReleases(
    name="TensorRT-LLM",
    package=__name__,
    root="TorchLlmArgs",
    manifests={
        "1.0.0": ("1.0.0",),
        "1.1.0": ("1.1.0",),
        "1.2.1": ("1.2.1",),
        "1.3.0rc": ("1.3.0rc27", "1.3.0rc29"),  # rc27 covers the constructor arguments and rc29 the calls
    },
    titles={"1.3.0rc": "1.3.0rc (arguments as of 1.3.0rc27, calls as of 1.3.0rc29)"},
    development="1.3.0rc-unpinned",  # names only
    ranges={  # from the validators of 1.2.1 and the executor
        "tensor_parallel_size": (1, None),
        "pipeline_parallel_size": (1, None),
        "context_parallel_size": (1, None),
        "moe_expert_parallel_size": (1, None),
        "max_batch_size": (1, None),
        "max_num_tokens": (1, None),
        "max_seq_len": (1, None),
        "stream_interval": (1, None),
        "num_postprocess_workers": (0, None),
        "batch_wait_timeout_ms": (0, None),
        "batch_wait_timeout_iters": (0, None),
        "batch_wait_max_tokens_ratio": (0, 1),
        "cuda_graph_config.max_batch_size": (0, None),
        "kv_cache_config.free_gpu_memory_fraction": (0, 1),
        "kv_cache_config.max_attention_window": (1, None),
        "kv_cache_config.max_gpu_total_bytes": (0, None),
        "kv_cache_config.tokens_per_block": (1, None),
        "cache_transceiver_config.max_tokens_in_buffer": (1, None),
        "cache_transceiver_config.kv_transfer_timeout_ms": (1, None),
        "cache_transceiver_config.kv_transfer_sender_future_timeout_ms": (1, None),
        "cache_transceiver_config.kv_transfer_poll_interval_ms": (1, None),
    },
    any_case=frozenset({"LoadFormat"}),
)


def release_for(version: str) -> ApiManifest:
    """Return the known release of the same minor line.

    For a newer line, log a warning and return the newest release, of which no part counts as read completely: names
    that it lacks may exist. So keys of 1.4 candidates are passed on, and not rejected as unknown.

    Args:
        version: installed version of TensorRT-LLM.

    Raises:
        ConfigError: the version is older than 1.0 or not a version.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError(f"Invalid TensorRT-LLM version {version!r}: expected a release such as 1.2.1")
    line = (int(match[1]), int(match[2]))
    lines = {(int(each.name.split(".")[0]), int(each.name.split(".")[1])): each for each in LIBRARY.releases}
    below = [known for known in lines if known <= line]
    if not below:
        raise ConfigError(f"TensorRT-LLM {version} is too old. Install 1.0.0 or newer.")
    release = lines[max(below)]
    if max(below) != line:
        _log.warning(
            "TensorRT-LLM %s is unknown; using the argument schema of %s. Check docs/trtllm.md", version, release.title
        )
        return replace(release, not_read=release.not_read | {f"{owner} in part" for owner in release.owners})
    if version != release.name:
        _log.info("Using the argument schema of TensorRT-LLM %s for %s", release.title, version)
    return release
