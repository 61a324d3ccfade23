"""Remove stale records of a deployment from etcd and JetStream (`python -m
dynamo_trtllm.clear_namespace`).
"""

from dynamo_trtllm.config.parser import run_module

if __name__ == "__main__":
    run_module("dynamo_trtllm.cli.clear_namespace", "python -m dynamo_trtllm.clear_namespace")
