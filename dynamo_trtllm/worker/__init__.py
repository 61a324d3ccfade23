"""The process that owns an engine: start, serve, drain, close. Knows no HTTP but its health port, no router."""

from dynamo_trtllm.worker.worker import Worker

__all__ = ["Worker"]
