"""Chat with a running frontend in a terminal (`python -m dynamo_trtllm.chat`)."""

from dynamo_trtllm.config.parser import run_module

if __name__ == "__main__":
    run_module("dynamo_trtllm.cli.chat", "python -m dynamo_trtllm.chat")
