"""`python -m dynamo_trtllm.launch` starts a deployment."""

from dynamo_trtllm.config.parser import run_module

if __name__ == "__main__":
    run_module("dynamo_trtllm.launch.main", "python -m dynamo_trtllm.launch")
