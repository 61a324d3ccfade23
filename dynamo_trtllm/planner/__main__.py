"""`python -m dynamo_trtllm.planner` runs a planner."""

from dynamo_trtllm.config.parser import run_module

if __name__ == "__main__":
    run_module("dynamo_trtllm.planner.main", "python -m dynamo_trtllm.planner")
