"""`python -m dynamo_trtllm.chat` talks to a running frontend."""

from dynamo_trtllm.cli.chat import main

if __name__ == "__main__":
    main()
