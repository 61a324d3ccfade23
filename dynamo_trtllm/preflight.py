"""Check engine arguments without loading an engine (`python -m dynamo_trtllm.preflight`)."""

if __name__ == "__main__":
    try:
        from dynamo_trtllm.cli.preflight import main

        main()
    except KeyboardInterrupt:  # during imports, before the command handles it
        raise SystemExit(130) from None
