"""`python -m dynamo_trtllm.clear_namespace` removes what a deployment left in etcd and JetStream."""

from dynamo_trtllm.cli.clear_namespace import main

if __name__ == "__main__":
    main()
