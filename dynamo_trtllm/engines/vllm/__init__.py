"""vLLM's `AsyncLLM` as an engine. The package is imported when such a worker starts, and in `bindings.py` alone."""
