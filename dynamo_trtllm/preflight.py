"""Check engine arguments without loading an engine (`python -m dynamo_trtllm.preflight`)."""

from dynamo_trtllm.config.parser import run_module

if __name__ == "__main__":
    run_module("dynamo_trtllm.cli.preflight", "python -m dynamo_trtllm.preflight")
