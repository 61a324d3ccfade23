"""Start and supervise the processes of a deployment file (`python -m dynamo_trtllm.launch`)."""
