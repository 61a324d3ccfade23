"""`python -m dynamo_trtllm.preflight` judges engine arguments before anything loads."""

from dynamo_trtllm.cli.preflight import main

if __name__ == "__main__":
    main()
