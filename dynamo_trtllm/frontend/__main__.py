"""Start a frontend: `python -m dynamo_trtllm.frontend`."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.frontend.process.main import main

        main()
    except KeyboardInterrupt:  # while modules load; later, the server handles the signal
        raise SystemExit(130) from None
