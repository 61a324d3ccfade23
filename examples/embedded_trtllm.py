"""Run a TensorRT-LLM worker from your own launch script, on one node or several.

    python examples/embedded_trtllm.py \\
        --model-path /models/gpt-oss-120b --disaggregation-mode decode

The script accepts every flag and environment variable of `dynamo-trtllm worker`. On several nodes,
start it with `examples/llmapi_launch.sh`.

The `__main__` guard at the end is needed. An engine on several GPUs starts a process per GPU, and
each of them imports this file again. Without the guard each process would start another engine.
"""

from __future__ import annotations

from dynamo_trtllm.config.load import exit_with, load
from dynamo_trtllm.config.models import WorkerConfig
from dynamo_trtllm.observability import logging as observe_logging
from dynamo_trtllm.protocol.errors import ConfigError
from dynamo_trtllm.worker.worker import Worker

PROG = "embedded_trtllm.py"


def main() -> None:
    try:
        config = load(WorkerConfig, prog=PROG)
        config = config.model_copy(update={"engine": "trtllm"})
        observe_logging.setup(config.log_level, config.disaggregation_mode, config.log_format)
        Worker(config).run()  # until SIGTERM, which drains
    except ConfigError as exc:
        exit_with(PROG, exc)


if __name__ == "__main__":
    main()
