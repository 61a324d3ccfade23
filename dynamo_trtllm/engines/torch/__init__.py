"""Run any causal language model that transformers can load, on one CPU or GPU.

The engine has continuous batching and paged KV.
"""
