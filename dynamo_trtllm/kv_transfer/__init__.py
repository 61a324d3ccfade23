"""Moves KV from a prefill process to a decode process. Knows pieces of memory and tickets, no models and no torch."""
