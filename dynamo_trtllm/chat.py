"""Chat with a running frontend in a terminal (`python -m dynamo_trtllm.chat`)."""

from dynamo_trtllm.config.parser import command_streams

if __name__ == "__main__":
    with command_streams("python -m dynamo_trtllm.chat"):
        from dynamo_trtllm.cli.chat import main

        main()
