"""TensorRT-LLM's PyTorch-backend `LLM` behind the engine protocol: the one room that imports `tensorrt_llm`."""
