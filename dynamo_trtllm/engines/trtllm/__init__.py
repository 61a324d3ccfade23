"""TensorRT-LLM's PyTorch-backend `LLM` behind the engine protocol: the only package that imports `tensorrt_llm`."""
