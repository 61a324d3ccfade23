"""`python -m dynamo_trtllm.clear_namespace` removes what a deployment left in etcd and JetStream."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.cli.clear_namespace import main

        main()
    except KeyboardInterrupt:  # while it loads: later it ends in its own way
        raise SystemExit(130) from None
