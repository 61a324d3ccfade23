"""Run vLLM's `AsyncLLM` as an engine.

Only `bindings.py` imports vLLM, when a worker with this engine starts.
"""
