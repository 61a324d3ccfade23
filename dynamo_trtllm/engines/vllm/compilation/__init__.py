"""When and where vLLM's kernels are compiled."""
