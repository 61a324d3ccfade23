"""`python -m dynamo_trtllm.launch` starts a deployment."""

from dynamo_trtllm.config.parser import command_streams

if __name__ == "__main__":
    with command_streams("python -m dynamo_trtllm.launch"):
        from dynamo_trtllm.launch.main import main

        main()
