"""Validate TensorRT-LLM arguments before anything is loaded, without TensorRT-LLM, a GPU or a
network.
"""
