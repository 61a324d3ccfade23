"""Disaggregated serving of large language models: prefill and decode in separate processes, KV over UCX."""

__version__ = "0.1.0"
