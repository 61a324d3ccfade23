"""Remove stale records of a deployment from etcd and JetStream (`python -m dynamo_trtllm.clear_namespace`)."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.cli.clear_namespace import main

        main()
    except KeyboardInterrupt:  # during imports, before the command handles it
        raise SystemExit(130) from None
