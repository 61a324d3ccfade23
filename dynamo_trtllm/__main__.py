"""Start a worker (`python -m dynamo_trtllm`)."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.worker.main import main

        main()
    except KeyboardInterrupt:  # during imports, before signal handlers are installed
        raise SystemExit(130) from None
