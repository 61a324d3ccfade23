"""`python -m dynamo_trtllm.launch` starts a deployment."""

from dynamo_trtllm.launch.main import main

if __name__ == "__main__":
    main()
