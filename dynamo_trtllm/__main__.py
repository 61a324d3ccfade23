"""Start a worker (`python -m dynamo_trtllm`)."""

from dynamo_trtllm.config.parser import command_streams

if __name__ == "__main__":
    with command_streams("python -m dynamo_trtllm"):
        from dynamo_trtllm.worker.main import main

        main()
