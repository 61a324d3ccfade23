"""`python -m dynamo_trtllm.preflight` judges engine arguments before anything loads."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.cli.preflight import main

        main()
    except KeyboardInterrupt:  # while it loads: later it ends in its own way
        raise SystemExit(130) from None
