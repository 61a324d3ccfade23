"""`python -m dynamo_trtllm.frontend` starts a frontend."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.frontend.main import main

        main()
    except KeyboardInterrupt:  # while it loads: later it ends in its own way
        raise SystemExit(130) from None
