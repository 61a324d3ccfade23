"""`python -m dynamo_trtllm.frontend` starts a frontend."""

from dynamo_trtllm.frontend.main import main

if __name__ == "__main__":
    main()
