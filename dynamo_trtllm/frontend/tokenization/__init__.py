"""Tokenize conversations, and parse output tokens into reasoning, content and tool calls.

No HTTP, no engines.
"""
