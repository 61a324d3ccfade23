"""Run inference libraries (TensorRT-LLM, vLLM) as engines."""
