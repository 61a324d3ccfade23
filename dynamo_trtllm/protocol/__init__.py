"""What crosses processes: messages, errors, streams, phases and KV events.

This package imports nothing of the others.
"""
