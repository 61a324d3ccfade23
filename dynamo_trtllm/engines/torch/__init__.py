"""Any causal language model that transformers loads, on one CPU or GPU: continuous batching over a paged KV pool."""
