"""`python -m dynamo_trtllm.chat` talks to a running frontend."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.cli.chat import main

        main()
    except KeyboardInterrupt:  # while it loads: later it ends in its own way
        raise SystemExit(130) from None
