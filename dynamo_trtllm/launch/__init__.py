"""Start and supervise all processes of one machine (`python -m dynamo_trtllm.launch`)."""
