"""`python -m dynamo_trtllm`: one worker process."""

from dynamo_trtllm.worker.main import main

if __name__ == "__main__":
    main()
