"""The HTTP frontend: accepts OpenAI requests, calls prefill and decode workers, streams tokens.

Imports no engine.
"""
