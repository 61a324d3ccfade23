"""Read what TensorRT-LLM reports while it runs: statistics, the time of steps, and events of its
prefix cache.
"""
