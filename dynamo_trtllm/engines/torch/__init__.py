"""Run any causal language model that transformers can load on one CPU or GPU, with continuous
batching and paged KV.
"""
