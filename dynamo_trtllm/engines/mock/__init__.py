"""Simulate an engine without weights, with fixed step time, deterministic tokens and real KV
transfers.
"""
