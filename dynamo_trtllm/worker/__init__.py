"""The worker process, which owns one engine: it starts, serves, drains and closes it."""

from dynamo_trtllm.worker.worker import Worker

__all__ = ["Worker"]
