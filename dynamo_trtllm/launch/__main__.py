"""`python -m dynamo_trtllm.launch` starts a deployment."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.launch.main import main

        main()
    except KeyboardInterrupt:  # while it loads: later it ends in its own way
        raise SystemExit(130) from None
