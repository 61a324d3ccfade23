"""Start a frontend: `python -m dynamo_trtllm.frontend`."""

from dynamo_trtllm.config.parser import run_module

if __name__ == "__main__":
    run_module("dynamo_trtllm.frontend.process.main", "python -m dynamo_trtllm.frontend")
