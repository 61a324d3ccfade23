"""Engine for TensorRT-LLM's `LLM` with the PyTorch backend.

Only its `bindings` module imports `tensorrt_llm`.
"""
