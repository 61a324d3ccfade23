"""Check engine arguments without loading an engine (`python -m dynamo_trtllm.preflight`)."""

from dynamo_trtllm.config.parser import command_streams

if __name__ == "__main__":
    with command_streams("python -m dynamo_trtllm.preflight"):
        from dynamo_trtllm.cli.preflight import main

        main()
