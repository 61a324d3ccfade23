"""The worker process: it starts one engine, serves its requests, drains it and closes it."""

from dynamo_trtllm.worker.worker import Worker

__all__ = ["Worker"]
