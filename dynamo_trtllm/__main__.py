"""Start a worker (`python -m dynamo_trtllm`)."""

from dynamo_trtllm.config.parser import run_module

if __name__ == "__main__":
    run_module("dynamo_trtllm.worker.main", "python -m dynamo_trtllm")
