"""Chat with a running frontend in a terminal (`python -m dynamo_trtllm.chat`)."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.cli.chat import main

        main()
    except KeyboardInterrupt:  # during imports, before the command handles it
        raise SystemExit(130) from None
