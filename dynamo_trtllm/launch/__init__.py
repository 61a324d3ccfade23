"""Start and supervise all processes of one machine from a YAML file (`python -m
dynamo_trtllm.launch`).
"""
