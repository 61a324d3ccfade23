"""`python -m dynamo_trtllm` starts a worker."""

from dynamo_trtllm.worker.main import main

if __name__ == "__main__":
    main()
