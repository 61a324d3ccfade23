"""Remove stale records of a deployment from etcd and JetStream (`python -m dynamo_trtllm.clear_namespace`)."""

from dynamo_trtllm.config.parser import command_streams

if __name__ == "__main__":
    with command_streams("python -m dynamo_trtllm.clear_namespace"):
        from dynamo_trtllm.cli.clear_namespace import main

        main()
