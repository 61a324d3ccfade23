"""Simulate an engine without weights.

It has a fixed step time, deterministic tokens and real KV transfers.
"""
