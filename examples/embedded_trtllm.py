"""A TensorRT-LLM worker from a launch script of your own, on one node or several.

    python examples/embedded_trtllm.py --model-path /models/gpt-oss-120b --disaggregation-mode decode

takes every flag and environment variable of `python -m dynamo_trtllm`; what is set here is the default. On several
nodes start it with `examples/llmapi_launch.sh`.

The `__main__` guard at the end is needed: an engine on several GPUs starts a process for each, and every one of them
imports this file again. Without the guard each would start an engine of its own.
"""

from __future__ import annotations

from dynamo_trtllm.config.load import exit_with, load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.errors import ConfigError
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.worker.worker import Worker

PROG = "embedded_trtllm.py"


def main() -> None:
    try:
        config = load(WorkerConfig, prog=PROG, description="A TensorRT-LLM worker of my own.").config
        config = config.model_copy(update={"engine": "trtllm"})
        observe_logging.setup(config.log_level, config.disaggregation_mode, config.log_format)
        Worker(config).run()  # until SIGTERM, which drains
    except ConfigError as exc:
        exit_with(PROG, exc)


if __name__ == "__main__":
    main()
