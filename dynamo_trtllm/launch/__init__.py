"""Everything of one machine from one YAML file: `python -m dynamo_trtllm.launch deploy/local/demo.yaml`."""
