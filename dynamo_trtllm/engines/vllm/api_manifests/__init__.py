"""Describe the arguments of the supported release of vLLM. scripts/vllm_manifest generates its manifest."""

from dynamo_trtllm.engines.manifests import LibraryReleases

VERSION = "0.24.0"
LIBRARY = LibraryReleases(
    name="vLLM",
    package=__name__,
    root="AsyncEngineArgs",
    manifests={VERSION: (VERSION,)},
    ranges={
        "tensor_parallel_size": (1, None),
        "pipeline_parallel_size": (1, None),
        "data_parallel_size": (1, None),
        "max_num_batched_tokens": (1, None),
        "max_num_seqs": (1, None),
        "block_size": (1, None),
        "max_model_len": (-1, None),  # -1: as long as the memory allows
        "gpu_memory_utilization": (0.01, 1),
        "max_logprobs": (-1, None),
    },
    any_case=frozenset({"Literal"}),
)
