"""Start a frontend: `python -m dynamo_trtllm.frontend`."""

from dynamo_trtllm.config.parser import command_streams

if __name__ == "__main__":
    with command_streams("python -m dynamo_trtllm.frontend"):
        from dynamo_trtllm.frontend.process.main import main

        main()
