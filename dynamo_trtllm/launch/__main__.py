"""`python -m dynamo_trtllm.launch` starts a deployment."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.launch.main import main

        main()
    except KeyboardInterrupt:  # during imports, before signal handlers are installed
        raise SystemExit(130) from None
